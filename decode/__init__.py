"""The decode role: the consumer half of the connector, block reservation and arrival tracking."""
