"""Published runs of language models on TPUs, and what the cost model makes of them."""
