"""``torchrun ... -m tpverify.worker SUBJECT``: the job's processes become the ranks; rank 0 draws the cases and gives the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from tpverify.cli.app import COMMANDS, error, main
from tpverify.cli.exit_codes import ExitCode
from tpverify.errors import CaseError, JobError
from tpverify.options import WORLDS
from tpverify.processes.job_rank import JobRank, from_environment

if TYPE_CHECKING:
    from tpverify.processes.link import Address, Listener

JOIN_SECONDS = 300.0
"""How long all processes of the job get to start."""
KEY = "tpverify/controller"
FEW = (1, 2, 3, 4)
"""World sizes that a job draws from, where it has room for them, beside the powers of two and its own."""
VERDICTS: dict[int, str] = {
    ExitCode.VIOLATED: "a check failed: the report is on the stdout of rank 0",
    ExitCode.USAGE: "wrong usage: the message is on the stderr of rank 0",
    ExitCode.NOTHING_CHECKED: "nothing was checked: the reason is on the stderr of rank 0",
    ExitCode.INTERNAL: "no verdict: the reason is on the stderr of rank 0, unless rank 0 is what is gone",
    ExitCode.INTERRUPTED: "interrupted",
}


class Verdict(Exception):
    """What torchrun shows of a process that does not exit with 0."""


def run(arguments: Sequence[str]) -> int:
    """Be one process of the job; the code with which all of them exit.

    Args:
        arguments: of ``tpverify verify``, or the name of another command and its arguments.
    """
    try:
        me = from_environment(os.environ)
    except CaseError as problem:
        if {"-h", "--help"}.intersection(arguments):
            return run_command(arguments, max(FEW))
        error(str(problem))
        return ExitCode.USAGE
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the other way to count GPUs cannot be followed by a fork
    from tpverify.processes.launcher import die_with
    from tpverify.processes.link import use_loopback

    use_loopback(me.master)
    die_with(os.getppid(), signal.SIGTERM)  # torchrun may be killed, too
    code = _control(me, arguments) if me.rank == 0 else _follow(me)
    if code:
        _explain(code)
    return code


def run_command(arguments: Sequence[str], ranks: int) -> int:
    """Run a command of the command line in a job of so many ranks; its exit code."""
    named = bool(arguments) and arguments[0] in COMMANDS
    name, rest = (arguments[0], list(arguments[1:])) if named else ("verify", list(arguments))
    command = main.get_command(click.Context(main), name)
    for option in command.params if command is not None else ():
        if option.name == "world":
            option.type, option.default = click.Choice(WORLDS[1:]), WORLDS[1]
        elif option.name == "world_sizes":
            option.default = ",".join(map(str, world_sizes_for(ranks)))
    try:
        main.main([name, *rest], prog_name="tpverify.worker")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def world_sizes_for(ranks: int) -> list[int]:
    """TP degrees to draw from in a job: few ranks, and all of them so that every machine takes part."""
    powers = {2**exponent for exponent in range(ranks.bit_length())}
    return sorted(size for size in {*FEW, *powers, ranks} if size <= ranks)


def _control(me: JobRank, arguments: Sequence[str]) -> int:
    """Rank 0: command all processes, one that holds this process's own rank included."""
    from tpverify.processes.job_pool import Job, use_job
    from tpverify.processes.link import Listener

    listener = Listener(me.master)
    controller = os.getpid()
    if os.fork() == 0:  # before there is any thread
        os._exit(_hold_own_rank(me, listener, controller))
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    job: Job | None = None
    code = int(ExitCode.INTERNAL)
    try:
        store = _job_store(me)  # kept: where no agent of torchrun keeps one, it is this process's
        job = Job(listener, me.world_size, (me.master, me.port))
        store.set(KEY, json.dumps([listener.address.port, listener.address.token.hex()]))
        job.join(JOIN_SECONDS)
        use_job(job)
        code = run_command(arguments, me.world_size)
    except CaseError as problem:
        error(str(problem))
        code = int(ExitCode.USAGE)
    except KeyboardInterrupt:
        code = int(ExitCode.INTERRUPTED)
    except (JobError, OSError, RuntimeError) as problem:
        error(_first_line(problem))
    _ignore_signals()
    if job is None:
        return code
    if signal.SIGTERM in received:
        # torchrun ends all processes of a machine when it finds one dead: then that is what went wrong.
        try:
            job.check(besides=signal.SIGTERM.name)
        except JobError as problem:
            error(str(problem))
            code = int(ExitCode.INTERNAL)
    job.end(code)
    return code


def _hold_own_rank(me: JobRank, listener: Listener, controller: int) -> int:
    """In a child of rank 0: what the other processes of the job are; signals are its parent's business."""
    from tpverify.processes.launcher import die_with

    _ignore_signals()
    listener.close()
    die_with(controller)
    return _hold_rank(me, listener.address)


def _follow(me: JobRank) -> int:
    """Another rank than 0: do what the controller says, and tell it when a signal ends this process."""
    from tpverify.processes.job_launcher import Left, leave
    from tpverify.processes.link import Address

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a store that waits in C++ would not be interrupted
    try:
        port, token = json.loads(_job_store(me).get(KEY))
    except (OSError, RuntimeError) as problem:
        error(f"rank {me.rank}: Expected rank 0 to be there within {JOIN_SECONDS:g} seconds but got {_first_line(problem)}")
        return ExitCode.INTERNAL
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    try:
        return _hold_rank(me, Address(me.master, port, bytes.fromhex(token)))
    except Left as left:
        _ignore_signals()
        return 128 + left.number


def _hold_rank(me: JobRank, address: Address) -> int:
    from tpverify.processes.job_launcher import JobLauncher

    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is the controller's result
    try:
        launcher = JobLauncher(me, address)
        launcher.run()
        _ignore_signals()
    except OSError as problem:
        error(f"rank {me.rank}: Expected to reach rank 0 at {address.host}:{address.port} but got {problem}")
        return ExitCode.INTERNAL
    if launcher.code is None:
        error(f"rank {me.rank}: Expected a verdict of rank 0 but it is gone")
        return ExitCode.INTERNAL
    return launcher.code


def _first_line(problem: Exception) -> str:
    """Without the frames that torch's C++ errors go on with."""
    return f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _job_store(me: JobRank) -> Any:
    """The store of the whole job, which torchrun's agent on the first machine keeps."""
    from torch.distributed.rendezvous import rendezvous

    return next(iter(rendezvous("env://", me.rank, me.world_size, timeout=timedelta(seconds=JOIN_SECONDS))))[0]


def _explain(code: int) -> None:
    """Tell torchrun what the code means: it shows that where it would show the traceback of an exception."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

        try:
            raise Verdict(f"exit code {code}, {VERDICTS.get(code, 'ended by a signal')}")
        except Verdict as meaning:
            meaning.__traceback__ = None  # whoever reads it wants no lines of this file
            ErrorHandler().record_exception(meaning)


if __name__ == "__main__":
    status = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)  # together with the other processes, however full of libraries this one is
