"""What both vLLM roles share: KV layout, stream protocol, host link, worker host."""
