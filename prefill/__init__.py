"""The prefill role: the producer half of the connector, prefix loading and store writing."""
