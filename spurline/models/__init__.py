"""The model families, by name. No torch import: `configs.py` lists presets, `model.py` is imported on build."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from spurline.config import RunConfig
from spurline.registry import register

# A family's configs live at <package>.configs as CONFIGS: config name -> function that returns a RunConfig.
_FAMILIES: dict[str, str] = {
    "agpt": "spurline.models.agpt",
    "deepseek_v3": "spurline.models.deepseek_v3",
    "glm4_moe": "spurline.models.glm4_moe",
    "gpt_oss": "spurline.models.gpt_oss",
    "mixtral": "spurline.models.mixtral",
    "moe_10b_2b": "spurline.models.moe_10b_2b",
    "olmoe": "spurline.models.olmoe",
    "qwen2_moe": "spurline.models.qwen2_moe",
    "qwen3": "spurline.models.qwen3",
    "qwen3_vl": "spurline.models.qwen3_vl",
}


def register_family(name: str, package: str) -> None:
    """Register a model family: `package` is an importable package with a `configs` module that has CONFIGS."""
    register("model family", _FAMILIES, name, package)


def forget_family(name: str) -> None:
    del _FAMILIES[name]


def family_names() -> list[str]:
    return sorted(_FAMILIES)


def family_package(name: str) -> str:
    return _FAMILIES[name]


def family_configs(name: str) -> dict[str, Callable[[], RunConfig[Any]]]:
    return import_module(f"{_FAMILIES[name]}.configs").CONFIGS
