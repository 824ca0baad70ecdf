"""From what a user calls a model to the folder that vLLM loads.

Knows: the built-in names and what a model folder must hold. Does not know: how a model is made.
"""

from __future__ import annotations

from pathlib import Path

from mooncake.common.errors import ConfigError

BUILT_IN = ("tiny", "gemma")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def resolve_model(name_or_dir: str | Path) -> Path:
    """The folder of `tiny`, `gemma` (both made on first use) or of a model that is already on disk.

    A folder of the working directory that is called like a built-in model is meant only when written as `./tiny`.
    Raises ConfigError, whose text names what is missing. Never looks at a model hub.
    """
    # Here and not above: gemma and tiny are only looked at when asked for.
    if name_or_dir == "tiny":
        from mooncake.models.tiny import cached_tiny

        return cached_tiny()
    if name_or_dir == "gemma":
        from mooncake.models.gemma import cached_gemma

        return cached_gemma()
    return checked_folder(Path(name_or_dir).expanduser())


def checked_folder(folder: Path) -> Path:
    """`folder`, made absolute, if it holds a configuration, weights and a tokenizer. Raises ConfigError."""
    if not folder.exists():
        raise ConfigError(f"model {str(folder)!r} is neither a built-in name ({', '.join(BUILT_IN)}) nor a folder")
    if not folder.is_dir():
        raise ConfigError(f"model {str(folder)!r} is a file; give the folder that holds config.json")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json; give a folder in Hugging Face's layout")
    if not (any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))):
        raise ConfigError(f"model folder {folder} has no weights (*.safetensors or *.bin)")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"model folder {folder} has no tokenizer (one of {', '.join(_TOKENIZERS)})")
    return folder.resolve()
