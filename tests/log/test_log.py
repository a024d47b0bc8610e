"""What stands in a log line, and what never does."""

from __future__ import annotations

import io
import json
import logging
import os

import pytest
import structlog

from edged import log


@pytest.fixture(autouse=True)
def _restore():
    handlers, level = logging.getLogger().handlers, logging.getLogger().level
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers = handlers
    logging.getLogger().setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_lines_name_process_component_and_request():
    stream = io.StringIO()
    logger = log.get_logger("server")  # made before configure, as modules do
    log.configure("info", "json", process="daemon", stream=stream)
    with log.request_scope("r-7"):
        logger.info("request finished", tokens=3)
    logger.info("idle")
    first, second = lines(stream)
    assert first["message"] == "request finished"
    assert (first["level"], first["process"], first["component"]) == ("info", "daemon", "server")
    assert (first["request_id"], first["tokens"]) == ("r-7", 3)
    assert str(first["timestamp"]).endswith("Z")
    assert "request_id" not in second


def test_level_cuts_what_is_less_important():
    stream = io.StringIO()
    log.configure("warning", "json", stream=stream)
    log.get_logger("x").info("no")
    log.get_logger("x").warning("yes")
    assert [line["message"] for line in lines(stream)] == ["yes"]


def test_users_words_are_replaced_by_their_length():
    stream = io.StringIO()
    log.configure("debug", "json", stream=stream)
    log.get_logger("x").info("bad idea", prompt="my secret", token_ids=[1, 2, 3])
    assert "secret" not in stream.getvalue()
    assert lines(stream)[0]["prompt"] == "<9 hidden>"
    assert lines(stream)[0]["token_ids"] == "<3 hidden>"


@pytest.mark.parametrize("style", ["json", "text"])
def test_tracebacks_show_no_local_variables(style):
    stream = Terminal()
    log.configure("info", style, stream=stream)

    def fails(prompt: str) -> None:
        raise ValueError("went wrong")

    try:
        fails("my " + "secret")
    except ValueError:
        log.get_logger("x").exception("request failed")
    assert "went wrong" in stream.getvalue()
    assert "fails(" in stream.getvalue()
    assert "my secret" not in stream.getvalue()


def test_auto_is_text_on_a_terminal_and_json_elsewhere():
    terminal, pipe = Terminal(), io.StringIO()
    log.configure("info", "auto", stream=terminal)
    log.get_logger("x").info("hello")
    log.configure("info", "auto", stream=pipe)
    log.get_logger("x").info("hello")
    assert "\x1b[" in terminal.getvalue()
    assert lines(pipe)[0]["message"] == "hello"


def test_text_off_a_terminal_has_no_colours():
    stream = io.StringIO()
    log.configure("info", "text", stream=stream)
    log.get_logger("x").info("hello")
    assert "hello" in stream.getvalue()
    assert "\x1b[" not in stream.getvalue()


def test_libraries_warnings_come_in_the_same_form_and_their_chatter_does_not():
    stream = io.StringIO()
    log.configure("debug", "json", process="daemon", stream=stream)
    logging.getLogger("grpc._cython").warning("odd %s", "frame")
    logging.getLogger("asyncio").debug("using selector")
    (line,) = lines(stream)
    assert (line["message"], line["component"], line["level"]) == ("odd frame", "grpc._cython", "warning")


def test_journald_gets_its_priority(tmp_path, monkeypatch):
    with (tmp_path / "journal").open("w+", encoding="utf-8") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        log.configure("info", "auto", stream=stream)
        log.get_logger("x").error("bad")
        logging.getLogger("grpc").warning("odd")
        stream.seek(0)
        first, second = stream.read().splitlines()
    assert first.startswith('<3>{"')
    assert second.startswith('<4>{"')
    assert json.loads(first[3:])["message"] == "bad"


def test_a_reader_that_is_gone_loses_lines_and_nothing_else():
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w", encoding="utf-8")
    log.configure("info", "json", stream=stream)
    for _ in range(3):
        log.get_logger("x").info("hello")
        log.get_logger("x").error("hello")
    with pytest.raises(BrokenPipeError):
        stream.close()
