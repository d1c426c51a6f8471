"""The launchers that users have, with two real CPU processes.

Measured with accelerate 1.15 and torch 2.14 on a machine without GPU:

    accelerate launch --cpu --num_processes 2          one process, without a word
    accelerate launch --multi_gpu --num_processes 2    two ranks; a script that makes its own
                                                       `Accelerator()` gets two runs of one process
                                                       unless ACCELERATE_USE_CPU=true, while
                                                       `multimodal train` sees to it itself
    torchrun --nproc-per-node 2                        the same
    torchrun --master-port 0                           hangs; use --standalone for a free port
"""

import pytest
from tools import finish, make_shards, retrieval, rows, start, tiny_tree, write_config

STEPS = 20
LAUNCHERS = {
    "accelerate": ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_launched_processes_train_like_one(tmp_path, launcher):
    shards = make_shards(tmp_path / "data", 59)
    configs = {}
    for name in ("one", "two"):
        settings = (f"train.duration={STEPS} steps", "data.augment.flip=0.5", "data.workers=1")
        tree = tiny_tree(tmp_path / name, shards, *settings)
        tree["evaluate"] = {"shapes": retrieval(shards)}
        configs[name] = str(write_config(tmp_path / f"{name}.yaml", tree))
    finish(start("scripts/train.py", configs["one"]))
    port = ("--main_process_port=0",) if launcher == "accelerate" else ()
    output = finish(start(*LAUNCHERS[launcher], *port, "scripts/train.py", configs["two"]))
    assert "2 process(es) with 4 pairs each on cpu" in output
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert len(one) == len(two) == STEPS + 1
    for ours, theirs in zip(two[:STEPS], one[:STEPS], strict=True):
        for column in ("step", "lr", "batch_hash"):
            assert ours[column] == theirs[column]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_mistake_ends_with_one_sentence_and_code_2(tmp_path):
    tree = tiny_tree(tmp_path / "run", tmp_path / "nothing")
    config = str(write_config(tmp_path / "run.yaml", tree))
    output = finish(start("scripts/train.py", config), code=2)
    assert "error: " in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", ["data.train.path=nothing", "model.tokenizer={kind: hf, name: x}"]
)
def test_a_mistake_is_told_once_by_two_processes(tmp_path, mistake):
    """The first is seen before the processes meet, the second by rank 0 alone."""
    tree = tiny_tree(tmp_path / "run", make_shards(tmp_path / "data", 9))
    config = str(write_config(tmp_path / "run.yaml", tree))
    output = finish(start(*LAUNCHERS["torchrun"], "scripts/train.py", config, mistake), code=1)
    assert len([line for line in output.splitlines() if line.startswith("error: ")]) == 1, output
    assert "multimodal/cli.py" not in output, "no traceback"
