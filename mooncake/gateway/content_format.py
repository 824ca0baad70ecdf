"""Does a chat template expect message content as a string, or as a list of parts?

vLLM decides this by looking for a loop over `message.content` in the template's syntax tree (`vllm/renderers/hf.py`,
`_detect_content_format`), and both sides must decide alike: the rendered text differs. This is the same search, written anew.
Pure: knows Jinja's syntax tree; does not know tokenizers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.sandbox

ContentFormat = Literal["string", "openai"]


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` blocks (they mark the assistant's tokens for training) are only walked through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_generation_support"), [], [], body).set_lineno(line)


def template_environment() -> jinja2.Environment:
    """Parses what Hugging Face's chat templates may hold."""
    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )


def content_format(template: str) -> ContentFormat:
    """`string` too when the template does not parse: rendering will say what is wrong with it."""
    try:
        tree = template_environment().parse(template)
        return "openai" if any(_content_loops(tree)) else "string"
    except (jinja2.TemplateError, AssertionError, AttributeError):
        return "string"


def _is_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is `name` (or `name.key`), maybe filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if key is None:
        return _is_name(node, name)
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == key


def _aliases(tree: nodes.Template, name: str) -> Iterator[str]:
    """`name` and every variable that is assigned from it."""
    yield name
    pending = deque([name])
    while pending:
        source = pending.popleft()
        for assign in tree.find_all(nodes.Assign):
            if _reads(assign.node, source):
                assert isinstance(assign.target, nodes.Name)
                yield assign.target.name
                if assign.target.name != source:
                    pending.append(assign.target.name)


def _message_names(tree: nodes.Template) -> list[str]:
    """Loop variables of `{% for message in messages %}`."""
    sources = list(_aliases(tree, "messages"))
    names = []
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, source) for source in sources):
            assert isinstance(loop.target, nodes.Name)
            names.append(loop.target.name)
    return names


def _macro_parameters(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Parameters of `macro` that some call binds to a message's content."""
    names = [argument.name for argument in macro.args]
    bound: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = list(zip(names, call.args, strict=False))
        given += [
            (pair.key, pair.value) for pair in call.kwargs if isinstance(pair, nodes.Keyword) and pair.key in names
        ]
        bound |= {name for name, value in given if any(_reads(value, message, "content") for message in messages)}
    return bound


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    messages = _message_names(tree)
    in_macro: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        bound = _macro_parameters(tree, macro, messages)
        in_macro |= {id(loop): bound for loop in macro.find_all(nodes.For)}
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, message, "content") for message in messages):
            yield loop
        elif isinstance(loop.iter, nodes.Name):
            bound = in_macro.get(id(loop), {"content"})
            if loop.iter.name in bound:
                yield loop
