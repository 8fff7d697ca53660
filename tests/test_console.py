"""The terminal: wrapped and coloured there, plain elsewhere, with one kind of bar."""

import re
import sys
from types import SimpleNamespace

import pytest
from samples import terminal_of

from clipline import cli
from clipline.console import Bar, Stages, fail, say, tell, wrapped
from clipline.errors import refuse


def test_without_a_terminal_text_is_printed_as_it_is(capsys):
    long = "warning: " + "word " * 40
    say(f"{long}\nsecond")
    tell(long)
    fail(refuse("clip", -1, "above 0", "give more"))
    out, err = capsys.readouterr()
    assert out == f"{long}\nsecond\n"
    assert err == f"{long}\nerror: clip=-1 must be above 0: give more\n"


def test_a_terminal_colours_the_first_word_and_gives_the_hint_a_line(monkeypatch):
    terminal = terminal_of(monkeypatch, 80)
    fail(refuse("clip", -1, "above 0", "give more"))
    tell("  warning: look")
    assert terminal.getvalue() == (
        "\x1b[1;31merror:\x1b[0m clip=-1 must be above 0\n\x1b[36mhint:\x1b[0m give more\n"
        "  \x1b[33mwarning:\x1b[0m look\n"
    )


def test_no_color_is_respected_and_text_is_still_wrapped(monkeypatch):
    terminal = terminal_of(monkeypatch, 20, "stdout")
    monkeypatch.setenv("NO_COLOR", "1")
    say("warning: one two three four")
    assert terminal.getvalue() == "warning: one two\n      three four\n"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("short", ["short"]),
        ("one two three four five six", ["one two three four", "  five six"]),
        ("  rate  one two three four", ["  rate  one two", "      three four"]),  # below the text, up to a third
        ("> rate  one two three four", ["> rate  one two", "      three four"]),
        ("a/very/long/path/without/a/space end", ["a/very/long/path/without/a/space", "  end"]),
    ],
)
def test_lines_are_cut_between_words_with_a_hanging_indent(line, parts):
    assert wrapped(line, 20) == parts


def test_no_control_character_of_a_file_reaches_a_terminal_or_a_log(monkeypatch, capsys):
    hostile = "loss\x1b[2K\rok\x07\x9b31m\u202e\x00"
    warnings_of_others = cli._form_warning(UserWarning(hostile), UserWarning, hostile, 1)

    def everything():
        say(hostile)
        tell(hostile)
        fail(hostile)
        bar = Bar(2, 0, hostile)
        bar.show(1, hostile, hostile, hostile, quiet=0.0)
        bar.wait(hostile)
        bar.end(hostile, well=False)
        bar.close()

    everything()
    written = "".join(capsys.readouterr()) + warnings_of_others
    assert written.count("\\x1b[2K\\rok\\x07\\x9b31m\\u202e\\x00") > 8
    assert all(one.isprintable() or one == "\n" for one in written)
    terminals = terminal_of(monkeypatch, 200), terminal_of(monkeypatch, 200, "stdout")
    everything()
    for terminal in terminals:  # which has sequences of ours alone
        ours = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", terminal.getvalue())
        assert "\\x1b[2K\\rok\\x07" in ours
        assert all(one.isprintable() or one == "\n" for one in ours)
        assert "\x1b[2K\rok" not in terminal.getvalue()


def test_a_bar_without_a_terminal_prints_now_and_then_and_at_its_end(capsys):
    bar = Bar(3, 0, "step 0/3")
    bar.show(1, "step 1/3", "fast", "numbers")  # the last line is younger than ten seconds
    assert capsys.readouterr().err == ""
    bar.show(2, "step 2/3", "fast", "numbers", quiet=0.0)
    bar.wait("compiling")
    bar.show(3, "step 3/3", "fast", "numbers")
    bar.end("stopped", well=False)
    bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 2/3  numbers  fast", "step 2/3  compiling", "step 3/3  numbers  fast  stopped",
    ]  # fmt: skip


def test_stages_come_one_after_the_other(capsys):
    with Stages() as stages:
        for stage in ("reading", "grouping"):
            for done in (1, 2, 2):
                stages.show(stage, done, 2)
    assert capsys.readouterr().err.splitlines() == ["reading 100%", "grouping 100%"]


def test_a_notebook_has_one_bar_that_is_updated_and_keeps_no_speed(monkeypatch):
    shown = []

    class Handle:
        def update(self, bundle, raw):
            shown.append(bundle)

    def display(bundle, raw, display_id):
        shown.append(bundle)
        return Handle()

    kernel = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    bar = Bar(4, 0, "round 0/4")
    bar.show(4, "round 4/4", "3 rounds/s", "<accuracy> 0.25", quiet=0.0)
    assert shown[-1]["text/plain"] == "round 4/4  <accuracy> 0.25  3 rounds/s"
    bar.close()
    assert shown[-1]["text/plain"] == "round 4/4  <accuracy> 0.25"
    assert '<progress value="4" max="4"' in shown[-1]["text/html"]
    assert "&lt;accuracy&gt; 0.25" in shown[-1]["text/html"]
    bar.end("finished", well=True)
    bar.close()
    assert "accent-color: green" in shown[-1]["text/html"]
    assert "finished" in shown[-1]["text/html"]
