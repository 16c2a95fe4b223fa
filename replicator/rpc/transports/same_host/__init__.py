"""Messages by a Unix socket, large arrays by shared memory."""
