"""Layouts of KV tensors and what decides that two of them are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.common.errors import ConfigError
from mooncake.vllm.fingerprint import fingerprint, model_identity
from mooncake.vllm.kv_layout import LayerLayout, block_ranges, copy_ranges, describe
from tests.vllm.half_engines import Tensor


def tensor(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape, dtype=np.float32))


def test_blocks_of_a_dense_tensor() -> None:
    one = tensor(8, 2, 4, 16)
    layout = describe({"a": one, "b": tensor(8, 2, 4, 16)}, 8, 4)
    assert layout.bytes_per_block == 2 * 2 * 4 * 16 * 4
    assert (layout.layers[0].base, layout.layers[0].stride) == (one.data_ptr(), 2 * 4 * 16 * 4)


def test_permuted_blocks_and_gaps_between_blocks_are_fine() -> None:
    permuted = Tensor(np.zeros((8, 4, 2, 16), dtype=np.float32).transpose(0, 2, 1, 3))
    assert describe({"a": permuted}, 8, 4).layers[0].block_bytes == 2 * 4 * 16 * 4
    apart = Tensor(np.zeros((8, 3, 4, 16), dtype=np.float32)[:, 0])
    layer = describe({"a": apart}, 8, 4).layers[0]
    assert (layer.block_bytes, layer.stride) == (4 * 16 * 4, 3 * 4 * 16 * 4)


def test_keys_and_values_apart_are_two_layers_and_kernel_blocks_are_joined() -> None:
    layout = describe({"a": tensor(2, 8, 4, 16)}, 8, 4)
    assert [layer.name for layer in layout.layers] == ["a#k", "a#v"]
    assert describe({"a": tensor(16, 2, 4)}, 8, 4).layers[0].block_bytes == 2 * 2 * 4 * 4


def test_shared_layers_count_once() -> None:
    one = tensor(8, 16)
    assert len(describe({"a": one, "b": one}, 8, 4).layers) == 1


@pytest.mark.parametrize(
    "bad", [tensor(7, 16), Tensor(np.zeros((16, 8), dtype=np.float32).T), Tensor(np.zeros((8, 4, 8), dtype=np.float32)[:, :, ::2])]
)  # fmt: skip
def test_what_cannot_be_moved_whole_is_refused(bad: Tensor) -> None:
    with pytest.raises(ConfigError, match="KV cache of layer a"):
        describe({"a": bad}, 8, 4)


ids = st.lists(st.integers(0, 30), max_size=20)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20), st.sampled_from([0, 7]))
def test_merged_copies_are_the_single_ones(pairs: list[tuple[int, int]], gap: int) -> None:
    layer = LayerLayout("a", 1000, 10 + gap, 10, ((), (), ""))
    merged = copy_ranges(layer, [a for a, _ in pairs], 5000, 10, [b for _, b in pairs])
    flat = [(f + i, t + i) for f, t, n in merged for i in range(n)]
    assert flat == [(1000 + a * (10 + gap) + i, 5000 + b * 10 + i) for a, b in pairs for i in range(10)]
    if not gap and pairs == [(i, i) for i in range(len(pairs))]:
        assert len(merged) <= 1


@given(ids)
def test_merged_ranges_are_the_single_ones(blocks: list[int]) -> None:
    ranges = block_ranges(LayerLayout("a", 0, 10, 10, ((), (), "")), blocks)
    assert [a + i for a, n in ranges for i in range(n)] == [b * 10 + i for b in blocks for i in range(10)]


# --- fingerprint ---


class Config:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


def test_the_fingerprint_depends_on_meaning_and_not_on_place(tmp_path: Any) -> None:
    a, b = describe({"a": tensor(8, 2, 4)}, 8, 4), describe({"a": tensor(16, 2, 4)}, 16, 4)
    assert fingerprint(a, engine={}, model="m", salt="") == fingerprint(b, engine={}, model="m", salt="")
    others = [
        fingerprint(a, engine={"dtype": "x"}, model="m", salt=""),
        fingerprint(a, engine={}, model="n", salt=""),
        fingerprint(a, engine={}, model="m", salt="s"),
        fingerprint(describe({"a": tensor(8, 4, 2)}, 8, 4), engine={}, model="m", salt=""),
        fingerprint(describe({"b": tensor(8, 2, 4)}, 8, 4), engine={}, model="m", salt=""),
    ]
    assert len({*others, fingerprint(a, engine={}, model="m", salt="")}) == 6


def test_the_model_identity_sees_weights_and_configuration_but_not_the_folder(tmp_path: Any) -> None:
    for name, content in (("one", b"x"), ("two", b"x"), ("three", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content * 500_000)
    one, two, three = (
        model_identity(str(tmp_path / name), None, Config(hidden=1, _name_or_path=name))
        for name in ("one", "two", "three")
    )
    assert one == two != three
    assert one != model_identity(str(tmp_path / "one"), None, Config(hidden=2))
    assert model_identity("org/model", "main", Config()) != model_identity("org/model", "v2", Config())
