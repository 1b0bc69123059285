"""Jinja chat templates of Hugging Face tokenizers, rendered in a sandbox. Torch-free.

Templates can use what `transformers` provides: messages, tools, add_generation_prompt and special tokens by name;
raise_exception, strftime_now, tojson, loop controls, and {% generation %} around the assistant's text.
"""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from spurline.data.chat_builtin import BUILT_IN
from spurline.untrusted import read_bytes, read_json, reason

Message = dict[str, Any]
NO_TEMPLATE = "none"
MAX_RENDERED = 2**26
"""Most characters that a template may write for one conversation."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Rendered(NamedTuple):
    text: str
    spans: list[tuple[int, int]]
    """Start and end, in characters, of the text that the template marks as the assistant's."""


class ChatTemplate:
    """A compiled template; errors in it or in a conversation are raised as one-line ValueErrors."""

    def __init__(self, source: str, special_tokens: dict[str, str], where: str, for_tools: str | None = None) -> None:
        """`where` names its origin in errors and counts; `for_tools` is another template, used with tools."""
        self.where = where
        self.source = source
        self.marks_generation = bool(_GENERATION.search(source))
        self._special_tokens = special_tokens
        self._template = _compiled(source, where)
        self._with_tools = self._template if for_tools is None else _compiled(for_tools, where)

    def render(self, messages: list[Message], tools: Any = None, add_generation_prompt: bool = False) -> Rendered:
        template = self._with_tools if tools else self._template
        spans: list[tuple[int, int]] = []
        template.environment.spans, template.environment.length = spans, 0
        context = {
            **self._special_tokens,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        blocks: list[str] = []
        try:
            for block in template.generate(**context):
                blocks.append(block)
                template.environment.length += len(block)
                if template.environment.length > MAX_RENDERED:
                    raise ValueError(f"it makes more than {MAX_RENDERED} characters of one conversation")
        except Exception as error:  # the template is third-party code, and may raise anything
            what = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(f"the chat template of {self.where} raised: {what}") from None
        return Rendered("".join(blocks), spans)


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning, if any, under both keys that templates read, whatever its own key is."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _compiled(source: str, where: str) -> Any:
    environment = _environment_class()()
    try:
        return environment.from_string(source)
    except Exception as error:
        number = getattr(error, "lineno", None)
        line = f", line {number}" if number else ""
        what = str(error).partition("\n")[0]
        raise ValueError(f"the chat template of {where} is not valid{line}: {what}") from None


@cache
def _environment_class() -> Any:
    """The class of a sandbox in which templates can't modify their inputs.

    `*` and `**` can't make values larger than MAX_RENDERED. Other expressions can: memory and time have no limit.
    """
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("chat templates need the package jinja2: pip install 'spurline[hf]'") from None

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: writes its content, and records its span."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja has it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

        def _note(self, caller: Any) -> str:
            written: str = caller()
            begin = self.environment.length  # type: ignore[attr-defined]
            self.environment.spans.append((begin, begin + len(written)))  # type: ignore[attr-defined]
            return written

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def __init__(self) -> None:
            super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
            self.length, self.spans = 0, []  # type: ignore[var-annotated]
            self.filters["tojson"] = _to_json
            self.globals["raise_exception"] = _raise
            self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(side) if hasattr(side, "__len__") else abs(side) for side in (left, right)]
            if (operator == "**" and max(sizes) > 64) or sizes[0] * sizes[1] > MAX_RENDERED:
                raise jinja2.TemplateError(f"operator {operator} of large values is not allowed")
            return super().call_binop(context, operator, left, right)

    def _raise(message: str) -> None:
        raise jinja2.TemplateError(message)

    return Environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """A tojson filter without the HTML escapes of Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def find_template(name: str, tokenizer_path: str) -> ChatTemplate | None:
    """The template named by data.chat_template, or if empty, the one in the tokenizer's folder; None for `none`."""
    if name == NO_TEMPLATE:
        return None
    folder = _folder_of(tokenizer_path)
    special_tokens = _special_tokens(folder) if folder else {}
    if name in BUILT_IN:
        return ChatTemplate(BUILT_IN[name], special_tokens, name)
    choices = f"{', '.join(BUILT_IN)}, {NO_TEMPLATE} or a file"
    if name:
        path = Path(os.path.expanduser(name))
        if not path.is_file():
            raise ValueError(f"data.chat_template {name!r} is not a file, nor one of {choices}")
        return ChatTemplate(_read(path), special_tokens, f"{path}")
    of_folder = _templates(folder) if folder else {}
    if "default" not in of_folder:
        whose = f"data.tokenizer {tokenizer_path!r}" if tokenizer_path else "the byte tokenizer"
        raise ValueError(f"{whose} has no chat template: choose one with data.chat_template ({choices})")
    return ChatTemplate(of_folder["default"], special_tokens, f"{folder}", of_folder.get("tool_use"))


def _folder_of(tokenizer_path: str) -> Path | None:
    if not tokenizer_path:
        return None
    path = Path(os.path.expanduser(tokenizer_path))
    return path if path.is_dir() else path.parent


def _templates(folder: Path) -> dict[str, str]:
    """The templates of a tokenizer folder by name; separate files take precedence over tokenizer_config.json."""
    found: dict[str, str] = {}
    for file in ("tokenizer_config.json", "chat_template.json"):
        content = _json(folder / file).get("chat_template")
        if isinstance(content, str):
            found["default"] = content
        for entry in content if isinstance(content, list) else ():
            match entry:
                case {"name": str(name), "template": str(template)}:
                    found[name] = template
    if (folder / "chat_template.jinja").is_file():
        found["default"] = _read(folder / "chat_template.jinja")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = _read(path)
    return found


def _special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and so on, as text."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, token in _json(folder / file).items():
            content = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"data.tokenizer: can't read '{path}': {reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"data.tokenizer: '{path}' is {error}") from None
    return content if isinstance(content, dict) else {}


def _read(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except OSError as error:
        raise ValueError(f"can't read the chat template '{path}': {reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"the chat template '{path}' is not UTF-8 text: {error}") from None
