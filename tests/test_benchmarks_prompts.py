"""The benchmark of prompts on caches: every layout is checked, and one that is wrong has no time."""

import json
from typing import Any

from benchmarks import decode, measure, prompts
from benchmarks.prompts import Case


def test_layouts_of_a_prompt_have_times_if_they_are_right(monkeypatch, capsys):
    monkeypatch.setattr(measure, "RESTS", 0)
    launches = [[("tables", 0.25), ("attention", 1.0)]]
    monkeypatch.setattr(decode, "kernel_times", lambda run, args, count: launches * count)
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 16}
    cases = {"one": Case((9,), 5, 64, **sizes), "packed": Case((1, 6), 3, 64, **sizes)}
    monkeypatch.setattr(prompts, "CASES", cases)

    def wrong(*args: Any, implementation: str | None) -> Any:
        out = prompts.on_cache(*args, implementation=implementation)
        return 1.1 * out if implementation is None else out

    _, arguments = prompts.LAYOUTS["contiguous"]
    monkeypatch.setitem(prompts.LAYOUTS, "contiguous", (wrong, arguments))
    prompts.main(["--iterations", "1"])
    *lines, results = capsys.readouterr().out.splitlines()
    rows = json.loads(results)
    for layout in ("pages64", "pages16", "int8", "int8_pages64", "int8_entries"):
        for name in cases:
            assert rows[name][layout]["host_us"] > 0
            assert rows[name][layout]["us"] == 1250 and rows[name][layout]["longest_us"] == 1000
            assert f"{layout} 1250.0 (1000.0) / " in lines[list(cases).index(name)]
    assert all("us" not in rows[name]["contiguous"] for name in cases)
    assert all("contiguous wrong result: 0.1" in x for x in lines)
    assert rows["one"]["forward"]["us"] == 1250
    assert "one request" in rows["packed"]["forward"]["refused"]
