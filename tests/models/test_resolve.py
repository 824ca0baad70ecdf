"""Model names and folders, and the cache they are built into."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.common.errors import ConfigError
from mooncake.models import resolve_model
from mooncake.models.cache import build_once, cache_dir
from mooncake.models.gemma import LAYERS, config, hf_name


def test_cache_follows_the_xdg_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "mooncake" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_dir() == Path("/home/somebody/.cache/mooncake/models")


def test_a_model_is_built_once(tmp_path: Path) -> None:
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "config.json").write_text("{}")

    target = tmp_path / "deep" / "model"
    assert build_once(target, build) == target
    assert build_once(target, build) == target
    assert len(calls) == 1
    assert [entry.name for entry in target.parent.iterdir()] == ["model"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        build_once(tmp_path / "model", build)
    assert list(tmp_path.iterdir()) == []


def test_the_later_of_two_builders_takes_the_earlier_ones_model(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def build(folder: Path) -> None:
        target.mkdir()
        (target / "mark").write_text("first")
        (folder / "mark").write_text("second")

    assert build_once(target, build) == target
    assert (target / "mark").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_in_hugging_face_layout_is_taken(tmp_path: Path) -> None:
    for name in ("config.json", "model-00001-of-00001.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ([], "no config.json"),
        (["config.json"], "no weights"),
        (["config.json", "a.safetensors"], "no tokenizer"),
    ],
)
def test_an_incomplete_folder_is_named_with_what_it_lacks(tmp_path: Path, files: list[str], complaint: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=complaint):
        resolve_model(tmp_path)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny, gemma"):
        resolve_model("lama")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(tmp_path / "file")


@pytest.mark.parametrize(
    ("gguf", "hf"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.17.post_ffw_norm.weight", "model.layers.17.post_feedforward_layernorm.weight"),
    ],
)
def test_gemma_tensor_names(gguf: str, hf: str) -> None:
    assert hf_name(gguf) == hf


def test_gemma_layers_alternate() -> None:
    kinds = config(1000)["layer_types"]
    assert len(kinds) == LAYERS
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [5, 11, 17]


def test_a_foreign_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vision\.weight"):
        hf_name("vision.weight")
