"""Places every request: which prefill instance, which decoding instance, or an early rejection."""
