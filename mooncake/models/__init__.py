"""Models to try the platform with: a tiny random one, and a small real one."""

from mooncake.models.resolve import BUILT_IN, resolve_model

__all__ = ["BUILT_IN", "resolve_model"]
