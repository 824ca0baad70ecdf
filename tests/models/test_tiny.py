"""The tiny model: what vLLM and the gateway rely on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake.models.tiny import CHAT_TEMPLATE, make_tiny

pytestmark = pytest.mark.slow

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


def test_same_arguments_same_bytes(tiny: Path, tmp_path: Path) -> None:
    again = make_tiny(tmp_path / "again")
    names = sorted(path.name for path in tiny.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (tiny / name).read_bytes() == (again / name).read_bytes(), name


def test_another_seed_other_weights_and_global_state_untouched(tiny: Path, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    other = make_tiny(tmp_path / "other", layers=1, seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert json.loads((other / "config.json").read_text())["num_hidden_layers"] == 1


def test_the_configuration_suits_vllm_on_a_cpu(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 32
    assert config["num_hidden_layers"] == 4
    assert config["num_key_value_heads"] == 2
    assert config["vocab_size"] == 4096
    assert config["max_position_embeddings"] == 32768
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize("text", ["def main(argv):\n    return 0\n", "Größe 🥮 月餅", " \t\n", ""])
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer.encode("<|im_start|>hi<|im_end|>")[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]


def test_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_template_with_tools(tokenizer: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert json.dumps(TOOL) in text
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\nrain<|im_end|>" in text
    assert "None" not in text


def test_no_tools_no_tools_block(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=[], tokenize=False)
    assert text == "<|im_start|>user\nx<|im_end|>\n"


def test_vllm_sees_a_template_over_plain_text() -> None:
    assert "in message['content']" not in CHAT_TEMPLATE
