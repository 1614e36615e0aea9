"""Forked processes begin, speak and end as processes do that `python` starts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import ranks

ENDS = {
    "by itself": "print('out'); import sys; print('err', file=sys.stderr)",
    "with a code": "import sys; sys.exit(3)",
    "with words": "import sys; sys.exit('no')",
    "with an error": "print('before'); 1 / 0",
    "by a signal": "import os; os.kill(os.getpid(), 9)",
    "interrupted": "raise KeyboardInterrupt",
    "at once": "import os; print('lost'); os._exit(4)",
    "with something left to do": "import atexit; atexit.register(print, 'last')",
    "with a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('end'))).start()",
    "with arguments": "import sys; print(sys.argv, __name__, sys.path[0] == '', sys.stdin.read())",
}


@pytest.mark.often(1)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_as_python_ends_it(how, unbuffered, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    words = ("-c", ENDS[how], "a", "b c")
    real = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    found = forked.run(*words, cwd=tmp_path)
    assert (found.returncode, found.stdout) == (real.returncode, real.stdout)
    assert found.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]  # frames of a traceback are others


def test_a_file_and_a_module_are_run_as_the_main_program(tmp_path):
    program = "import sys, beside; print(__name__, sys.argv[1:], beside.__name__)"
    (tmp_path / "beside.py").touch()
    (tmp_path / "program.py").write_text(program)
    assert forked.run(tmp_path / "program.py", 1).stdout == "__main__ ['1'] beside\n"
    assert forked.run("-m", "program", 2, cwd=tmp_path).stdout == "__main__ ['2'] beside\n"


def test_it_has_the_folder_the_variables_and_the_umask_of_whoever_starts_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/elsewhere")
    before = os.umask(0o027)
    try:
        code = "import os; print(os.getcwd(), os.environ['HOME'], os.environ.get('PATH'), oct(os.umask(0)), sep='\\n')"
        assert forked.run("-c", code, cwd=tmp_path).stdout.splitlines() == [
            str(tmp_path), "/elsewhere", os.environ["PATH"], "0o27"
        ]  # fmt: skip
        assert forked.run("-c", code, env={"HOME": "/x", **_read_at_import()}).stdout.splitlines()[1:3] == [
            "/x",
            "None",
        ]
    finally:
        os.umask(before)


def _read_at_import() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(forked.READ_AT_IMPORT)}


def test_a_variable_that_packages_read_once_is_refused():
    with pytest.raises(ValueError, match="OMP_NUM_THREADS is read at import: start a fresh process"):
        forked.run("-c", "", env={**os.environ, "OMP_NUM_THREADS": "7"})


def test_a_number_that_comes_again_is_not_of_the_one_that_ended():
    last = forked.start("-c", "")
    assert last.wait() == 0
    forked._server()._codes.update(dict.fromkeys(range(last.pid + 1, last.pid + 999), 0))
    assert [forked.run("-c", "import sys; print('out'); sys.exit(3)").returncode for _ in range(3)] == [3] * 3


def test_several_run_at_a_time_and_each_can_be_killed(tmp_path):
    code = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(600)"
    processes = [forked.start("-c", code, name, cwd=tmp_path) for name in "ab"]
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    assert len({os.getpid(), *(process.pid for process in processes)}) == 3
    assert [process.poll() for process in processes] == [None, None]
    processes[1].send_signal(signal.SIGTERM)
    assert processes[1].wait() == -signal.SIGTERM and processes[0].poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        processes[0].wait(timeout=0.05)
    assert processes[0].wait() == -signal.SIGKILL
    assert not any(Path(f"/proc/{process.pid}").exists() for process in processes)


def test_nothing_that_one_does_is_seen_by_the_next():
    assert forked.run("-c", "import fluxq.cli, os; fluxq.cli.main = None; os.environ['A'] = '1'").returncode == 0
    assert forked.run("-c", "import fluxq.cli, os; print(fluxq.cli.main is None, 'A' in os.environ)").stdout == (
        "False False\n"
    )


@pytest.mark.slow
def test_ranks_know_one_another_and_one_that_dies_ends_all():
    names = "'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'TORCHELASTIC_RUN_ID', 'MASTER_ADDR', 'MASTER_PORT'"
    code = f"import os; print(*(os.environ[name] for name in ({names})))"
    done = ranks.run(2, "-c", code)
    assert done.returncode == 0, done.stderr
    first, second = sorted(line.split() for line in done.stdout.splitlines())
    assert first[:3] == ["0", "0", "2"] and second[:3] == ["1", "1", "2"] and first[3:] == second[3:]
    code = "import os, time; time.sleep(600) if os.environ['RANK'] == '0' else os.kill(os.getpid(), 9)"
    done = ranks.run(2, "-c", code)
    assert done.returncode == 1 and "Signal 9 (SIGKILL)" in done.stderr
