"""Turn a value into bytes and back: pure, bounded, no sockets."""
