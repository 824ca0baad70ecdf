"""Where memory lies: checking what the application says of a range that it registers.

Knows: locations (`cpu`, `cpu:N`, `cuda:N`, `*`), and whom to ask. Does not know: regions, transfers.
"""

from __future__ import annotations

import re

from mooncake.common.errors import ConfigError, MooncakeError
from transfer_engine.device import cuda_driver
from transfer_engine.memory import device_ordinal
from transfer_engine.transports import sysio

ANYWHERE = "*"
_DEVICE = re.compile(r"cuda:\d{1,4}")


def settle(address: int, length: int, location: str, driver: str) -> str:
    """The location that holds for a range; `*` becomes `cuda:N` when it is memory of that GPU. `driver` is the path of the CUDA
    driver. Raises ValueError (not that memory), ConfigError (no driver, no such GPU), DeviceError."""
    if location.startswith("cuda"):
        return _on_device(address, length, location, driver)
    if sysio.is_mapped(address, length):
        return location
    found = _found(address, driver)
    if found is None:
        raise ValueError(f"[{address:#x}, +{length}) is not mapped memory of this process")
    if location == ANYWHERE:
        return _on_device(address, length, f"cuda:{found}", driver)
    raise ValueError(
        f"[{address:#x}, +{length}) is memory of cuda:{found}, not of {location!r}: register it with location='cuda:{found}', "
        "or pass the tensor to register_buffer"
    )


def _found(address: int, driver: str) -> int | None:
    try:
        return cuda_driver.load(driver).device_of(address)
    except MooncakeError:
        return None


def _on_device(address: int, length: int, location: str, path: str) -> str:
    if not _DEVICE.fullmatch(location):
        raise ValueError(f"location {location!r}: a GPU is named 'cuda:N', N counting as CUDA_VISIBLE_DEVICES does")
    driver, wanted = cuda_driver.load(path), device_ordinal(location)
    if wanted >= driver.device_count:
        raise ConfigError(
            f"location {location!r}: the driver shows {driver.device_count} GPUs; see CUDA_VISIBLE_DEVICES"
        )
    for at in (address, address + length - 1):
        found = driver.device_of(at)
        if found != wanted:
            where = "not memory of any GPU" if found is None else f"memory of cuda:{found}"
            raise ValueError(f"{at:#x} in [{address:#x}, +{length}) is {where}, though {location!r} was said")
    with driver.on(wanted):  # made now: it takes a while, and a driver that cannot should say so to who registers
        pass
    return location
