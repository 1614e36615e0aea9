"""Settings to walk down under a backlog, each with what it costs: `--elastic FILE`.

    - name: half
      above: 5                      # seconds of predicted wait from which it is used
      model: my-model-half-steps    # another checkpoint of this server, or
      num_inference_steps: 14       # fewer steps, or both
      measured: {psnr_db: 31.2}     # for the answer, as it was measured beforehand

Each request takes the first row down to which it need not wait longer than the next row says, so the server walks back
by itself. A request that says `model` or `num_inference_steps` keeps it; `"elastic": false` keeps all.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from fluxq.base.console import did_you_mean
from fluxq.base.files import read_text
from fluxq.serve.orders import Strict

_CURE = "docs/serving.md says what to write there"


class Setting(Strict):
    """A row of the file."""

    name: str = Field(min_length=1, max_length=80)
    above: float = Field(ge=0)
    model: str | None = None
    num_inference_steps: int | None = Field(default=None, ge=1)
    measured: dict[str, Any] = Field(default_factory=dict)


def read_settings(path: Path, models: Collection[str]) -> tuple[Setting, ...]:
    """Read the file; ValueError or FileNotFoundError naming what is wrong."""
    import yaml

    text = read_text(path, f"--elastic {path}", _CURE)
    try:
        rows = TypeAdapter(list[Setting]).validate_python(yaml.safe_load(text))
    except ValidationError as error:
        first = error.errors()[0]
        row, names = first["loc"][:1], ".".join(map(str, first["loc"][1:]))
        where = f"row {int(row[0]) + 1}{names and f': {names}'}" if row else "the file"
        raise ValueError(f"--elastic {path}: {where}: {first['msg']}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ValueError(f"--elastic {path} is no YAML{where}; {_CURE}") from None
    if not rows:
        raise ValueError(f"--elastic {path} holds no setting")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and row.above <= before.above:
            raise ValueError(f"--elastic {path}: {row.name} is used above {row.above:g} s, the row before it no later")
        if row.model is None and row.num_inference_steps is None:
            raise ValueError(f"--elastic {path}: {row.name} changes nothing; give model or num_inference_steps")
        if not _is_json(row.measured):
            raise ValueError(f"--elastic {path}: {row.name}: measured holds what JSON cannot; give numbers and texts")
        if row.model is not None and row.model not in models:
            raise ValueError(
                f"--elastic {path}: {row.name}: no model {row.model!r} is served{did_you_mean(row.model, models)}"
            )
    return tuple(rows)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
