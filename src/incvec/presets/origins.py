"""Where each value of a configuration comes from: a flag, a file, a preset or a default."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from incvec.config import RunConfig
from incvec.presets import layers_of, preset_stream
from incvec.presets.names import flatten

COLUMN = 44  # of the comments


def origins(config: RunConfig, given: Mapping[str, str]) -> dict[str, str]:
    """`section.key: origin` for every setting; `given` has the origins of those that were set by the user."""
    found = dict.fromkeys(flatten(config.resolved()), "default")
    found |= dict.fromkeys(preset_stream(config.method, config.dataset), f"preset of {config.dataset}")
    for section in config.sections:
        for name, values in layers_of(section, config.method, config.dataset, config.variant).items():
            found |= {f"{section}.{key}": f"preset {name}" for key in values}
    if config.class_order is not None:
        found["order_seed"] = "no seed: class_order is given"
    return found | {key: origin for key, origin in given.items() if key in found}


def render(config: RunConfig, given: Mapping[str, str]) -> str:
    """The resolved configuration as YAML that `--config` reads, each value with its origin as a comment."""
    source, lines = origins(config, given), []
    for key, value in config.resolved().items():
        if not isinstance(value, Mapping):
            lines.append(f"{_line(key, value):<{COLUMN}} # {source[key]}")
            continue
        lines.append(f"{key}:" if value else f"{key}: {{}}")
        lines += [f"{'  ' + _line(name, each):<{COLUMN}} # {source[f'{key}.{name}']}" for name, each in value.items()]
    return "\n".join(lines)


def _line(key: str, value: object) -> str:
    text = str(yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True))
    return f"{key}: " + text.removesuffix("\n").removesuffix("\n...")
