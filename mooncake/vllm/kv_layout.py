"""Where the KV blocks of this engine are in memory, and how ranges of them merge.

Knows: base address, block stride and block bytes of every layer. An engine block of a layer is opaque bytes: on a CPU its
inside is not token-major and depends on the instruction set. Does not know: who moves the bytes, or what equal means
(fingerprint.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mooncake.common.errors import ConfigError


class LayerLayout(msgspec.Struct, frozen=True):
    """One layer's blocks: block `b` is the `block_bytes` bytes at `base + b * stride`."""

    name: str
    base: int
    stride: int
    block_bytes: int
    inner: tuple[tuple[int, ...], tuple[int, ...], str]
    """Shape and stride inside a block and dtype: part of the fingerprint."""


class KVLayout(msgspec.Struct, frozen=True):
    """All layers in registration order."""

    layers: tuple[LayerLayout, ...]
    num_blocks: int
    block_size: int

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one engine block over all layers."""
        return sum(layer.block_bytes for layer in self.layers)


def describe(kv_caches: Mapping[str, Any], num_blocks: int, block_size: int) -> KVLayout:
    """Reads shapes and strides of the registered tensors. Layers that share one tensor (cross-layer KV sharing) count once.

    Raises ConfigError for a tensor whose blocks are not dense: those could not be moved as whole blocks.
    """
    layers: list[LayerLayout] = []
    seen: set[int] = set()
    for name, tensor in kv_caches.items():
        for part in _parts(name, tensor, num_blocks):
            if part.base not in seen:
                seen.add(part.base)
                layers.append(part)
    if not layers:
        raise ConfigError("MooncakeConnector: the model has no KV cache to move")
    return KVLayout(tuple(layers), num_blocks, block_size)


def _parts(name: str, tensor: Any, num_blocks: int) -> Iterator[LayerLayout]:
    """One layout a layer; two when keys and values are apart (`[2, num_blocks, ...]`)."""
    shape = tuple(tensor.shape)
    if len(shape) > 1 and shape[0] == 2 and shape[0] != num_blocks and shape[1] % num_blocks == 0:
        yield _layer(f"{name}#k", tensor[0], num_blocks)
        yield _layer(f"{name}#v", tensor[1], num_blocks)
    else:
        yield _layer(name, tensor, num_blocks)


def _layer(name: str, tensor: Any, num_blocks: int) -> LayerLayout:
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if not shape or shape[0] == 0 or shape[0] % num_blocks:
        raise ConfigError(f"KV cache of layer {name}: shape {shape} does not start with {num_blocks} blocks")
    ratio = shape[0] // num_blocks  # kernel blocks an engine block
    size = tensor.element_size()
    elements = _dense_elements(shape[1:], strides[1:])
    if elements is None or (ratio > 1 and strides[0] != elements) or strides[0] < elements:
        raise ConfigError(
            f"KV cache of layer {name}: shape {shape} with strides {strides} does not hold each block in one piece, "
            "so blocks cannot be moved whole; set VLLM_KV_CACHE_LAYOUT to a layout that does (e.g. LBHNC)"
        )
    inner = ((ratio, *shape[1:]), strides[1:], str(tensor.dtype))
    return LayerLayout(name, tensor.data_ptr(), strides[0] * size * ratio, elements * size * ratio, inner)


def _dense_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Elements of a block when it is a permutation of a contiguous array, else None."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            return None
        expected *= length
    return expected


def block_ranges(layer: LayerLayout, block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """(address, length) of the blocks in their order, adjacent ones merged."""
    ranges: list[tuple[int, int]] = []
    for block in block_ids:
        address = layer.base + block * layer.stride
        if ranges and ranges[-1][0] + ranges[-1][1] == address:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + layer.block_bytes)
        else:
            ranges.append((address, layer.block_bytes))
    return ranges


def copy_ranges(
    source: LayerLayout, source_blocks: Sequence[int], base: int, stride: int, target_blocks: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(source address, target address, length) for copying blocks pairwise; merged where both sides are adjacent.

    `base` and `stride` describe the same layer in the target's address space. Raises ValueError for unequal counts.
    """
    size = source.block_bytes
    ranges: list[tuple[int, int, int]] = []
    for ours, theirs in zip(source_blocks, target_blocks, strict=True):
        from_, to = source.base + ours * source.stride, base + theirs * stride
        if ranges:
            last_from, last_to, length = ranges[-1]
            if last_from + length == from_ and last_to + length == to:
                ranges[-1] = (last_from, last_to, length + size)
                continue
        ranges.append((from_, to, size))
    return ranges
