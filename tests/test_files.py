"""Files that may have come from anybody: bounded reads, whole writes, no links, locks."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from memtrain.errors import MemtrainError, printable
from memtrain.files import (
    JsonLines,
    Locked,
    locked,
    open_append,
    open_new,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    refuse_links,
    strict_json,
    write_atomic,
    write_output,
)


def test_read_is_bounded(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"x" * 11)
    assert read_bytes(path, 11) == b"x" * 11
    with pytest.raises(MemtrainError, match="larger than 10 bytes"):
        read_bytes(path, 10)


def test_read_refuses_invalid_utf8_and_json(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff")
    with pytest.raises(MemtrainError, match="not UTF-8"):
        read_text(path, 10)
    for text in ("{", "[" * 100_000, "1" * 10_000):
        with pytest.raises(MemtrainError, match=r"a\.json"):
            parse_json(text, "a.json")


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2, "a": 3}', "[NaN]", '{"a": -Infinity}'])
def test_strict_json_has_no_repeated_keys_and_no_nan(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    parse_json(text, "a.json")
    with pytest.raises(MemtrainError, match=r"a\.json: (the key 'a' is|-?\w+ is not JSON)"):
        read_json(path, 100)


def test_json_lines_ignores_a_truncated_last_line(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl", 1000, 20)
    assert lines.read() == [] and lines.length() == 0 and lines.truncate() == 0
    lines.append({"a": 1})
    lines.append([2], durable=True)
    with lines.path.open("a") as file:
        file.write('{"torn": ')
    assert lines.read() == [{"a": 1}, [2]]
    assert lines.truncate() == lines.length() == len('{"a": 1}\n[2]\n')
    assert lines.truncate(12) == len('{"a": 1}\n')
    lines.append(3)
    assert lines.read() == [{"a": 1}, 3] and lines.lost == 0
    os.truncate(lines.path, 0)
    lines.append(4)
    assert lines.lost == len('{"a": 1}\n3\n')


def test_json_lines_are_truncated_at_a_distant_line_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n" + b"x" * 200_000)
    assert JsonLines(path, 10).truncate() == 2
    path.write_bytes(b"x" * 200_000)
    assert JsonLines(path, 10).truncate() == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1\n{\n3\n", "line 2: "),
        (b"1\n\xff\n", "line 2: .*utf-8"),
        (b"1\n" + b"2" * 21, "line 2 is longer than 20 bytes"),
        (b"1\n" * 51, "has 102 bytes; at most 100 are read"),
    ],
)
def test_json_lines_are_read_within_limits(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(MemtrainError, match=rf"a\.jsonl: {message}"):
        JsonLines(tmp_path / "a.jsonl", 100, 20).read()


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "socket", "circle"])
def test_only_regular_files_are_read_and_appended_to(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    path = Path("a")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "circle":
        path.symlink_to(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(MemtrainError, match="not a regular file"):
        open_regular(path)
    with pytest.raises(MemtrainError, match="not a regular file|symbolic link"):
        open_append(path)


def test_read_follows_a_link_to_a_regular_file(tmp_path):
    (tmp_path / "real").write_bytes(b"1")
    (tmp_path / "link").symlink_to("real")
    assert read_bytes(tmp_path / "link", 1) == b"1"


def test_write_replaces_a_link_and_not_what_it_points_to(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    (tmp_path / "a.json").symlink_to(outside)
    write_atomic(tmp_path / "a.json", b"new")
    assert outside.read_bytes() == b"mine"
    assert (tmp_path / "a.json").read_bytes() == b"new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "outside"]


def test_failed_write_leaves_the_old_content_and_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write_atomic(path, b"new")
    assert caught.value.filename == str(path)  # else the command line could not name it
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("opener", [open_new, open_append])
def test_links_are_not_followed_to_write(tmp_path, opener):
    (tmp_path / "outside").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("outside")
    with pytest.raises((MemtrainError, FileExistsError)):
        opener(tmp_path / "link")
    assert (tmp_path / "outside").read_bytes() == b"mine"


def test_parent_links_are_refused_below_the_root_only(tmp_path):
    (tmp_path / "real" / "run").mkdir(parents=True)
    (tmp_path / "runs").symlink_to("real")
    root = tmp_path / "runs" / "run"
    refuse_links(root / "figures" / "a.png", root)  # the root may be behind a link
    (tmp_path / "elsewhere").mkdir()
    (root / "figures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MemtrainError, match="figures: is a symbolic link"):
        refuse_links(root / "figures" / "a.png", root)
    (root / "b").symlink_to("nowhere")
    with pytest.raises(MemtrainError, match="b: is a symbolic link"):
        refuse_links(root / "b", root)


HOLD = """
import sys, time
from pathlib import Path
from memtrain.files import locked
with locked(Path(sys.argv[1]), "busy"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_lock_names_its_holder_and_is_released_at_its_exit(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        held = rf"^busy \(process {other.pid} on "
        with pytest.raises(Locked, match=held), locked(path, "busy"):
            raise AssertionError("both hold it")
        other.send_signal(signal.SIGKILL)
    with locked(path, "busy"):
        assert str(os.getpid()) in path.read_text()


def test_a_lock_whose_file_is_removed_still_excludes_all_waiters(tmp_path):
    """Also those who wait for a file that its holder removes."""
    path, inside, most = tmp_path / "lock", [], []

    def work() -> None:
        for _ in range(20):
            with locked(path, "busy", wait=True, keep=False):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) == 80 and not path.exists()


def test_control_characters_are_escaped():
    assert printable("plain ü\n\t") == "plain ü\n\t"
    assert printable("\x1b]0;x\x07") == "\\x1b]0;x\\x07"
    assert printable("a\u202eb\x9b\udcff") == "a\\u202eb\\x9b\\udcff"
    assert str(MemtrainError("bad \x1b[2J")) == "bad \\x1b[2J"
    assert Path("ü\u200d").name == printable("ü\u200d")


def test_named_file_is_replaced_and_a_descriptor_is_written_to(tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "link").symlink_to(other)
    write_output(tmp_path / "deep" / "new", b"1")
    write_output(tmp_path / "link", b"2")
    assert other.read_text() == "mine" and (tmp_path / "link").read_bytes() == b"2"
    reader, writer = os.pipe()
    write_output(Path(f"/dev/fd/{writer}"), b"3")
    os.close(writer)
    assert os.read(reader, 9) == b"3"
    os.close(reader)


def test_json_for_programs_has_no_nan():
    value = {"a": [1, float("nan"), (2.5, float("inf"))], "b": {"c": -float("inf"), "d": "x"}}
    assert strict_json(value) == '{"a": [1, null, [2.5, null]], "b": {"c": null, "d": "x"}}'
