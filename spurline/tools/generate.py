"""`spurline generate`: generate text from the model of a run. Torch-free until the model is loaded."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from spurline import config_io
from spurline.config import RunConfig
from spurline.config.checks import seed_problems
from spurline.config_io import ConfigError
from spurline.models.common.sampling import Sampling
from spurline.run_folders import find_run
from spurline.tools.parsing import UserPackage, described, load_user_code, parse, split_options

if TYPE_CHECKING:
    from torch import nn

    from spurline.data.chat_samples import ChatFormat
    from spurline.data.tokenizer import Tokenizer

PROG = "spurline generate"
DESCRIPTION = """\
Generate text from the model of a run. RUN is a run folder with checkpoints, written
by any number of ranks.

examples
  spurline generate outputs/my_run --prompt "def main("
  spurline generate outputs/my_run --prompt "Once" --prompt "Twice" --temperature 0
  spurline generate outputs/my_run --prompts-file prompts.txt --json > answers.jsonl
  spurline generate outputs/my_run --chat --temperature 0

Generation stops at a document boundary token or after --max-tokens. When prompt and
output exceed the training sequence length, the older half of the context is dropped."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The options of `spurline generate`."""

    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, described("TEXT")] = ()
    """Prompt to continue; repeat the option for several prompts."""
    prompts_file: Annotated[str, described("FILE")] = ""
    """File with one prompt per line, or (*.jsonl) one JSON object per line with a "prompt" field."""
    batch_size: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """Number of prompts to process in one batch."""
    max_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 256
    """Maximum number of tokens to generate per prompt."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Random seed; prompt i (from 0) uses seed + i, so its output does not depend on the other prompts."""
    step: Annotated[int | None, described("N")] = None
    """Step of the checkpoint to load (default: the newest)."""
    sign_key_file: Annotated[str, described("FILE")] = ""
    """Refuse a checkpoint that was not signed with this key (--checkpoint.sign_key_file of the run)."""
    chat: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Answer prompts as chat turns, with the chat template of the run (data.chat_template) or of its tokenizer.
    Without a prompt: a conversation on the terminal, or one question from standard input."""
    system: Annotated[str, described("TEXT")] = ""
    """System message at the start of the conversation (with --chat)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Print JSON lines with prompt, text, tokens and finish (boundary or max_tokens)."""
    no_cache: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Do not use a KV cache: recompute the full context for every token. Slow; for debugging."""
    import_: UserPackage = ""

    def problems(self) -> list[str]:
        found = [
            f"--{name} must be at least 1, got {getattr(self, name)}"
            for name in ("batch_size", "max_tokens")
            if getattr(self, name) < 1
        ]
        found += [f"--{problem}" for problem in self.sampling.problems() + seed_problems(self)]
        if self.system and not self.chat:
            found.append("--system needs --chat")
        return found


def main(argv: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal can't encode
    run_folder, config, command, prompts = _parse_command(argv)
    if command.chat and not (command.prompt or command.prompts_file) and sys.stdin.isatty():
        from spurline.tools.chat import converse

        return converse(run_folder, config, command)
    prompts = prompts or read_prompts("-")
    if not all(prompts):
        raise ConfigError(["--prompt: the prompt is empty"])
    return _generate(run_folder, config, command, prompts)


def _parse_command(argv: list[str]) -> tuple[Path, RunConfig[Any], Command, list[str]]:
    """The run folder, its config, the options, and the prompts: none if they come from standard input."""
    problems = load_user_code(argv)
    before, _ = split_options(argv)
    command, not_understood = parse(Command, Command(), argv[len(before) :], f"{PROG} RUN", DESCRIPTION)
    problems += not_understood + command.problems()
    with _added_to(problems):
        run_folder, config = _open_run(before)
    with _added_to(problems):
        is_reported = any(problem.startswith("--prompt") for problem in not_understood)
        prompts = [] if is_reported else _prompts_of_options(command)
    if problems:
        raise ConfigError(problems)
    return run_folder, config, command, prompts


@contextmanager
def _added_to(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def _open_run(folders: list[str]) -> tuple[Path, RunConfig[Any]]:
    if len(folders) != 1:
        got = f", got {' '.join(map(repr, folders))}" if folders else ""
        raise ConfigError([f"expected one run folder first, as in {PROG} outputs/my_run --prompt TEXT{got}"])
    run_folder = find_run(folders[0])
    if not run_folder.is_dir():
        raise ConfigError([f"{run_folder}: no such folder"])
    _, _, config = config_io.load(run_folder / "config.json")
    return run_folder, config


def _prompts_of_options(command: Command) -> list[str]:
    given = bool(command.prompt) + bool(command.prompts_file)
    if given > 1 or (not given and not command.chat):
        raise ConfigError(["give either --prompt or --prompts_file"])
    return read_prompts(command.prompts_file) if command.prompts_file not in ("", "-") else list(command.prompt)


def read_prompts(path: str) -> list[str]:
    """Read the prompts in a file, skipping blank lines; standard input is a single prompt."""
    if path == "-":
        return [sys.stdin.read().strip()]
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError([f"--prompts_file {path}: can't read the file: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"--prompts_file {path}: not UTF-8 text"]) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError([f"--prompts_file {path}: the file has no prompts"])
    if not path.endswith(".jsonl"):
        return [line for _, line in numbered]
    return [_prompt_of_json(line, f"--prompts_file {path}, line {number}") for number, line in numbered]


def _prompt_of_json(line: str, where: str) -> str:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError([f"{where}: not JSON: {error.msg}"]) from None
    prompt = content.get("prompt") if isinstance(content, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError([f'{where}: not a JSON object with a "prompt" string'])
    return prompt


class Text:
    """A prompt and its generated continuation."""

    def __init__(self, prompt: str, tokenizer: Tokenizer, prompt_ids: list[int] | None = None) -> None:
        """`prompt_ids` are the model's input (default: a boundary token and the prompt)."""
        self.prompt = prompt
        self.prompt_ids = prompt_ids or [tokenizer.boundary_id, *map(int, tokenizer.encode(prompt))]
        self.written = ""
        self.num_tokens = 0
        self._decoder = tokenizer.decoder()
        for token in self.prompt_ids:  # decoding may depend on preceding tokens
            self._decoder.add(token)

    def add(self, token: int) -> str:
        """Append one token; returns the text that can be shown so far, never a partial character."""
        self.num_tokens += 1
        return self._append(self._decoder.add(token))

    def finish(self) -> str:
        return self._append(self._decoder.finish())

    def _append(self, piece: str) -> str:
        self.written += piece
        return piece


def _generate(run_folder: Path, config: RunConfig[Any], command: Command, prompts: list[str]) -> int:
    from spurline.data.tokenizer import tokenizer_for

    chat = open_chat_format(config) if command.chat else None
    tokenizer = chat.tokenizer if chat else tokenizer_for(config.data)
    texts = [
        Text(prompt, tokenizer, chat.prompt(first_messages(command, prompt)).tolist() if chat else None)
        for prompt in prompts
    ]
    if problems := _length_problems(texts, tokenizer, config):
        raise ConfigError(problems)
    model = load_model(run_folder, config, command.step, command.sign_key_file)
    started = time.perf_counter()
    stop_ids = chat.stop_ids if chat else frozenset({tokenizer.boundary_id})
    _write(texts, model, stop_ids, config.training.seq_len, command, chat)
    seconds, num_tokens = time.perf_counter() - started, sum(text.num_tokens for text in texts)
    print(f"{PROG}: {num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s", file=sys.stderr)
    return 0


def _length_problems(texts: list[Text], tokenizer: Tokenizer, config: RunConfig[Any]) -> list[str]:
    context, vocab_size = config.training.seq_len, config.model.vocab_size
    if tokenizer.vocab_size > vocab_size:
        return [f"the run's tokenizer has {tokenizer.vocab_size} tokens, but its model only {vocab_size}"]
    return [
        f"prompt {number} has {len(text.prompt_ids)} tokens including the boundary, more than the context length of"
        f" {context} (training.seq_len): shorten it"
        for number, text in enumerate(texts, 1)
        if len(text.prompt_ids) > context
    ]


def load_model(run_folder: Path, config: RunConfig[Any], step: int | None, sign_key_file: str = "") -> nn.Module:
    """Load the model from the checkpoint of `step` (default: the newest) on one process, in eval mode."""
    import torch

    from spurline.device import pick_device
    from spurline.models.common.init import build_to_load
    from spurline.models.common.linear import Embedding, Linear
    from spurline.moe import Experts
    from spurline.moe.kernels.cpu.workspace import product_dtype
    from spurline.moe.layer import SharedExperts
    from spurline.train.base_model import load_with_base
    from spurline.train.checkpoint.folder import WHY_NONE
    from spurline.train.checkpoint.manager import CheckpointManager
    from spurline.train.checkpoint.signature import read_key

    checkpoints = CheckpointManager(run_folder, interval=1, keep_latest_k=0, sign_key=read_key(sign_key_file))
    step = checkpoints.latest() if step is None else step
    if step is None:
        raise ConfigError([f"{checkpoints.folder} has no complete checkpoint: {WHY_NONE}"])
    if config.lora.rank:
        model = load_with_base(run_folder, config, step, pick_device(), read_key(sign_key_file))
    else:
        model = build_to_load(config.model, pick_device())
        checkpoints.load(step, model, optimizer=None)
    dtype = getattr(torch, config.training.dtype)
    model.compute_dtype = dtype
    rounds_experts = product_dtype(torch.empty(0, dtype=dtype, device=pick_device())) == dtype
    for module in model.modules():
        # Cast once instead of for every token; norms and routers keep their float32 weights, and so do experts on a
        # CPU without instructions for the dtype.
        if isinstance(module, Linear | Embedding | SharedExperts) or (isinstance(module, Experts) and rounds_experts):
            module.to(dtype)
    return model.eval()


def open_chat_format(config: RunConfig[Any]) -> ChatFormat:
    """The chat template of a run: from its data options, else from its tokenizer's folder."""
    from spurline.data.chat_samples import chat_format

    return chat_format(config.data)


def first_messages(command: Command, prompt: str) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": command.system}] if command.system else []
    return [*system, {"role": "user", "content": prompt}]


def _write(
    texts: list[Text],
    model: nn.Module,
    stop_ids: frozenset[int],
    context: int,
    command: Command,
    chat: ChatFormat | None,
) -> None:
    """Generate and print: a single text as it is generated, several when their batch is complete.

    With --chat, an answer is shown when it is complete, without its prompt.
    """
    from spurline.models.common.generate import stream

    is_live = len(texts) == 1 and not command.json and chat is None
    if is_live:
        _show(texts[0].prompt)
    for first in range(0, len(texts), command.batch_size):
        batch = texts[first : first + command.batch_size]
        for tokens in stream(
            model,
            [text.prompt_ids for text in batch],
            command.max_tokens,
            sampling=command.sampling,
            seed=command.seed + first,
            max_context=context,
            stop_id=stop_ids,
            cached=not command.no_cache,
        ):
            for text, token in zip(batch, tokens, strict=True):
                piece = "" if token is None else text.add(token)
                if is_live:
                    _show(piece)
        for number, text in enumerate(batch, first + 1):
            rest = text.finish()
            finish = "max_tokens" if text.num_tokens == command.max_tokens else "boundary"
            if chat is not None and chat.cut(text.written) != text.written:
                text.written, finish = chat.cut(text.written), "boundary"
            if command.json:
                content = {"prompt": text.prompt, "text": text.written, "tokens": text.num_tokens, "finish": finish}
                print(json.dumps(content), flush=True)
            elif is_live:
                _show(rest + "\n")
            elif chat is not None and len(texts) == 1:
                _show(text.written + "\n")
            else:
                between = "\n" if chat is not None else ""
                _show(f"--- {number} of {len(texts)}\n{text.prompt}{between}{text.written}\n")


def _show(text: str) -> None:
    from spurline.models.common.generate import printable

    print(printable(text), end="", flush=True)
