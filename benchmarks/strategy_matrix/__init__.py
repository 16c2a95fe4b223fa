"""Put many models under every strategy: the answer of one device, everywhere."""
