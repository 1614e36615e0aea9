"""Settings to walk down under a backlog: chosen by the predicted wait, told in the answer, left when it is over."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served import ask, running, until

from fluxq.serve.elastic import read_settings

IMAGES = "/v1/images/generations"
FILE = """
- {name: few, above: 0.001, num_inference_steps: 3, measured: {psnr_db: 31.5}}
- {name: fewer, above: 1000, num_inference_steps: 2}
"""


@pytest.mark.long
def test_a_setting_that_does_not_suit_a_request_is_passed_over(plain_checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    file = tmp_path / "elastic.yaml"
    file.write_text("- {name: more, above: 0, num_inference_steps: 50}\n", encoding="utf-8")
    body: dict[str, Any] = {"prompt": "a red three on black", "seed": 1}
    with running(plain_checkpoint("int8"), elastic=file, max_steps=400) as server, ThreadPoolExecutor() as pool:
        long = pool.submit(ask, server, IMAGES, body | {"num_inference_steps": 400, "deadline_ms": 1})
        until(lambda: any(entry.steps for entry in server.dispatcher.queue))
        server._served.limits = replace(server._served.limits, steps=40)
        status, _, answer = ask(server, IMAGES, body)
        assert status == 200 and answer["data"][0]["steps"] == 8 and "setting" not in answer["data"][0]
        assert long.result()[0] == 200


@pytest.mark.long
def test_a_backlog_walks_down_and_back(plain_checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    file = tmp_path / "elastic.yaml"
    file.write_text(FILE, encoding="utf-8")
    body: dict[str, Any] = {"prompt": "a red three on black", "seed": 1}
    with running(plain_checkpoint("int8"), elastic=file, max_steps=400) as server, ThreadPoolExecutor() as pool:

        def row(**more: object) -> dict[str, Any]:
            return ask(server, IMAGES, body | more)[2]["data"][0]

        assert row()["steps"] == 8
        long = pool.submit(row, num_inference_steps=400, deadline_ms=1)
        until(lambda: any(entry.steps for entry in server.dispatcher.queue))
        waiting = [pool.submit(row, **more) for more in ({}, {"elastic": False}, {"num_inference_steps": 5})]
        told = [each.result() for each in waiting]
        assert [(each["steps"], each.get("setting")) for each in told] == [
            (3, {"name": "few", "psnr_db": 31.5}),
            (8, None),
            (5, None),
        ]
        assert long.result()["steps"] == 400 and row()["steps"] == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- name: a\n  above: {", "is no YAML (line 2)"),
        ("", "should be a valid list"),
        ("[]", "holds no setting"),
        ("- {name: a, above: 1}", "a changes nothing"),
        ("- {name: a, above: 1, steps: 4}", "row 1: steps: Extra inputs"),
        ("- {name: a, above: .inf, num_inference_steps: 4}", "above"),
        ("- {name: a, above: 1, num_inference_steps: 4, measured: {psnr_db: .inf}}", "what JSON cannot"),
        ("- {name: a, above: 1, num_inference_steps: 4, measured: {day: 2026-01-01}}", "what JSON cannot"),
        ("- {name: a, above: 1, model: tiny-int9}", "did you mean 'tiny-int8'?"),
        ("- {name: a, above: 2, model: tiny-int8}\n- {name: b, above: 2, model: tiny-int8}", "b is used above 2 s"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "elastic.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        read_settings(file, ["tiny-int8"])
    assert said in str(caught.value) and str(file) in str(caught.value)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_settings(tmp_path / "nothing", [])
