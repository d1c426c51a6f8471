"""Rows of metrics: one for each step, hashes that know the order, times that add up."""

import json
import logging
import time

import pytest
from tools import make_shards, on_ranks, tiny_config

from multimodal.data.source import Skip
from multimodal.distributed import rank, world_size
from multimodal.train.curves import write_report
from multimodal.train.report import Meter, Report, batch_hash, drop_rows_after, read_rows

KEYS = [f"shard/{i} é" for i in range(12)]


def hash_of_part(keys):
    rows = len(keys) // world_size()
    return batch_hash(keys[rank() * rows : (rank() + 1) * rows])


def test_the_hash_of_a_step_does_not_depend_on_the_number_of_ranks():
    expected = batch_hash(KEYS)
    assert on_ranks(3, hash_of_part, KEYS) == [expected] * 3
    assert len(expected) == 16 and int(expected, 16) >= 0


def test_the_hash_of_a_step_tells_order_and_repetition():
    hashes = {batch_hash(keys) for keys in (KEYS, KEYS[::-1], KEYS[:-1], [*KEYS, KEYS[0]], [])}
    assert len(hashes) == 5


def test_rows_beyond_the_checkpoint_and_a_cut_line_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "loss": 0.1 * s} for s in (1, 2, 3)] + [{"step": 2, "eval": "e", "x": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1, "lo')
    drop_rows_after(path, 2)
    assert read_rows(path) == [rows[0], rows[1], rows[3]]
    before = path.stat().st_mtime_ns
    drop_rows_after(path, 2)
    assert path.stat().st_mtime_ns == before
    drop_rows_after(tmp_path / "none.jsonl", 2)
    assert read_rows(tmp_path / "none.jsonl") == []


def test_a_line_that_is_no_row_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_rows(path)


def test_rows_wait_for_a_disk_that_is_full(tmp_path, monkeypatch, caplog):
    """Each write leaves half a line behind, as a disk does that fills up meanwhile."""
    report = Report(tiny_config(tmp_path, tmp_path), start_step=0, total_steps=9)
    path, real = tmp_path / "nonfinite.jsonl", type(tmp_path).open
    row = {"loss": None, "grad_norm": None, "suspects": []}

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, text):
            self.file.write(text[: len(text) // 2])
            raise OSError(28, "No space left on device")

    report.nonfinite({"step": 1, **row})
    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "open", lambda *args, **kwargs: Full(real(*args, **kwargs)))
        for step in (2, 3):
            report.nonfinite({"step": step, **row})
    assert [r["step"] for r in read_rows(path)] == [1]
    assert caplog.text.count("its rows wait") == 1
    report.flush()
    assert [r["step"] for r in read_rows(path)] == [1, 2, 3]


def test_a_meter_counts_steps_only():
    meter = Meter()
    for _ in range(2):
        meter.start()
        time.sleep(0.03)
        meter.arrived()
        time.sleep(0.03)
        meter.done(10)
        time.sleep(0.2)
    figures = meter.figures()
    assert 0.3 < figures["data_wait"] < 0.7
    assert 50 < figures["samples_per_second"] < 20 / 0.12


def row(step):
    return {
        "step": step,
        "epoch": 0.5,
        "samples": 8 * step,
        "loss": 2.0 / step,
        "lr": 1e-3,
        "logit_scale": 14.0,
        "samples_per_second": 100.0,
        "data_wait": 0.25,
    }


@pytest.fixture
def report(tmp_path):
    (tmp_path / "run").mkdir()
    config = tiny_config(tmp_path / "run", make_shards(tmp_path / "data", 3))
    return Report(config, start_step=0, total_steps=5)


def test_what_is_reported_is_in_the_files_and_in_the_log(report, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with report:
        report.step(1)
        report.metrics(row(1))
        report.evaluation(1, "shapes", {"recall@1": 0.25, "recall@1_chance": 0.1, "images": 20})
        report.skips(1, [Skip("k", "00000.tar", "damaged picture", "why", 4, 9)])
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    evaluation = {"recall@1": 0.25, "recall@1_chance": 0.1, "images": 20}
    assert rows == [row(1), {"step": 1, "eval": "shapes", **evaluation}]
    assert read_rows(tmp_path / "run/skipped.jsonl") == [
        {
            "step": 1,
            "key": "k",
            "place": "00000.tar",
            "reason": "damaged picture",
            "detail": "why",
            "index": 4,
            "position": 9,
        }
    ]
    assert "loss 2.0000  lr 1.00e-03  scale 14.00  100 samples/s  data wait 25%" in caplog.text
    assert "shapes: recall@1 0.250" in caplog.text and "chance" not in caplog.text
    assert "skipped k in 00000.tar: damaged picture" in caplog.text


def test_a_terminal_gets_a_bar_and_the_log_goes_above_it(report, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    config = tiny_config(tmp_path / "run", tmp_path / "data")
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        stream = handler.stream
        with Report(config, start_step=2, total_steps=5) as bar:
            assert handler.stream is not stream
            logging.getLogger("multimodal").warning("hello above")
            bar.step(3)
            bar.metrics(row(3))
        assert handler.stream is stream
    finally:
        logging.getLogger().removeHandler(handler)
    shown = capsys.readouterr().err
    assert "hello above" in shown and "3/5" in shown and "100 samples/s" in shown


def test_curves_are_drawn_also_for_a_run_of_one_row_or_none(tmp_path):
    rows = [{**row(step), "skipped": 0} for step in (1, 2, 3)]
    rows += [{"step": 3, "eval": "shapes", "recall@1": 0.5, "acc5": None, "images": 7}]
    for part in (rows, rows[:1], []):
        (tmp_path / "report.png").unlink(missing_ok=True)
        write_report(tmp_path, part)
        assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]
