"""Networks for the experiments and benchmarks; the library never imports them."""
