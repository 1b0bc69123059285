"""`spurline routing`: which experts of a trained model fire on which text."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from spurline import config_io
from spurline.config_io import ConfigError
from spurline.files import write_file
from spurline.run_folders import find_run
from spurline.tools.console import complain
from spurline.tools.parsing import UserPackage, described, load_user_code, parse
from spurline.tools.subcommands import take_arguments

PROG = "spurline routing"
DESCRIPTION = """\
Show which experts of a trained model fire on which text. RUN is a run folder with
checkpoints; DATA is what --data.path takes (default: the data of the run). Writes a
page with the load of each layer's experts, the tokens and contexts each expert
prefers, and which experts fire together.

examples
  spurline routing outputs/my_run                        writes outputs/my_run/routing.html
  spurline routing outputs/my_run my_text/ --tokens 100000 --out text.html
  spurline routing outputs/my_run questions.jsonl --kind chat --json > routing.json"""


@dataclass(frozen=True)
class Command:
    tokens: Annotated[int, described("N")] = 32_768
    """Number of tokens to route (default: 32768, or all if there are fewer)."""
    batch_size: Annotated[int, described("N")] = 8
    """Sequences per forward pass (default: 8)."""
    kind: Annotated[Literal["run", "text", "chat"], described("KIND")] = "run"
    """How to read DATA: as text or chat (see --data.kind), or as the data of the run was (run, the default)."""
    out: Annotated[str, described("FILE")] = ""
    """Page to write (default: routing.html in the run folder)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Print the statistics as JSON."""
    step: Annotated[int | None, described("N")] = None
    """Step of the checkpoint to load (default: the newest)."""
    sign_key_file: Annotated[str, described("FILE")] = ""
    """Refuse a checkpoint that was not signed with this key (--checkpoint.sign_key_file of the run)."""
    import_: UserPackage = ""


def main(argv: list[str]) -> int:
    arguments, options = take_arguments(argv, Command())
    problems = load_user_code(options)
    command, not_understood = parse(Command, Command(), options, f"{PROG} RUN [DATA]", DESCRIPTION)
    problems += not_understood
    if not 1 <= len(arguments) <= 2:
        problems.append(
            f"expected RUN and maybe DATA, as in {PROG} outputs/my_run, got {' '.join(arguments) or 'none'}"
        )
    problems += [
        f"--{name} must be at least 1, got {getattr(command, name)}"
        for name in ("tokens", "batch_size")
        if getattr(command, name) < 1
    ]
    if problems:
        return complain(PROG, problems)
    return _show(find_run(arguments[0]), arguments[1] if len(arguments) > 1 else "", command)


def _show(run: Path, data_path: str, command: Command) -> int:
    if not run.is_dir():
        raise ConfigError([f"{run}: no such folder"])
    _, _, config = config_io.load(run / "config.json")
    if config.model.parallel_facts().num_experts == 0:
        raise ValueError(f"{run}: its model has no experts")
    out = Path(command.out) if command.out else run / "routing.html"
    if not out.absolute().parent.is_dir():
        raise ConfigError([f"--out {out}: there is no folder {out.absolute().parent}"])
    from spurline.data import check_data, open_data  # what follows imports torch
    from spurline.data.tokenizer import tokenizer_for

    section = config.data
    if data_path:  # with the run's tokenizer, even if it came with the run's data
        section = replace(section, path=data_path, weights="", validation_fraction=0.0, tokenizer=_tokenizer(config))
    if command.kind != "run":
        section = replace(section, kind=command.kind)
    if problems := check_data(section):
        raise ConfigError(problems)
    data = open_data(section, config.training.seq_len, config.training.seed)
    tokenizer = tokenizer_for(config.data)
    num_there = len(data.train.windows)
    num_sequences = min(-(-command.tokens // config.training.seq_len), num_there)
    from spurline.report.routing_page import routing_page
    from spurline.report.routing_statistics import Visits, layer_statistics
    from spurline.tools.generate import load_model
    from spurline.train.routing_visits import collect_visits

    model = load_model(run, config, command.step, command.sign_key_file)
    visits = Visits(*collect_visits(model, data.train, num_sequences, command.batch_size))
    layers = {layer: layer_statistics(visits, layer) for layer in visits.ids}
    about = f"{visits.tokens_NL.size:,} tokens of {data_path or 'the data of the run'}"
    write_file(out, routing_page(f"Routing of {run.name}", about, visits, layers, lambda ids: tokenizer.decode(ids)))
    if command.json:
        print(json.dumps({layer: _plain(found, tokenizer) for layer, found in layers.items()}))
    else:
        for layer, found in layers.items():
            print(f"{layer}: busiest expert {found.busiest:.2f} x the mean, {found.dead} never visited")
        print(f"page: {out}")
    return 0


def _tokenizer(config: Any) -> str:
    """The run's tokenizer as an option value; prepared data has it in its folder."""
    prepared = Path(config.data.path.split(",")[0]) / "tokenizer.json" if config.data.path else None
    return config.data.tokenizer or (str(prepared) if prepared is not None and prepared.is_file() else "")


def _plain(found: Any, tokenizer: Any) -> list[dict[str, Any]]:
    return [
        {
            "expert": number,
            "share": expert.share,
            "mean_weight": expert.mean_weight,
            "tokens": [
                {"id": token, "text": tokenizer.decode([token]), "visits": count, "share": share}
                for token, count, share in expert.tokens
            ],
        }
        for number, expert in enumerate(found.experts)
    ]
