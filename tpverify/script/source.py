"""Writes a script: straight-line code that starts gloo processes, builds, loads, calls and compares, as one would by hand."""

from __future__ import annotations

import keyword
import re
import sys
import textwrap
from collections.abc import Iterator

import torch

import tpverify
from tpverify.adapters.libraries import library_of
from tpverify.case import Case, call_label
from tpverify.errors import CaseError
from tpverify.logical import in_order
from tpverify.script.construction import Construction, construction
from tpverify.script.facts import Compared, Facts, Returned, facts_of
from tpverify.script.literals import LAYOUTS, Literals, laid_out
from tpverify.sharding import Layout, Partial, Replicate, local_shape
from tpverify.subjects.subject import Subject

TIMEOUT = 60
"""Seconds until gloo gives a collective up that a rank does not join."""

RESERVED = {
    "build",
    "dist",
    "differs",
    "expected",
    "finalize_gradients",
    "folder",
    "module",
    "mp",
    "output",
    "part",
    "rank",
    "sys",
    "torch",
}
RESERVED |= {"wrong", "summed", "timedelta", "tempfile", *LAYOUTS}

IMPORTS = (
    *("import sys", "import tempfile", "from datetime import timedelta"),
    *("import torch", "import torch.distributed as dist", "import torch.multiprocessing as mp"),
)

PART = '''
def part(dim, values):
    """This rank's shard of a tensor that is cut along a dimension."""
    return torch.tensor(values).chunk(WORLD_SIZE, dim)[dist.get_rank()].contiguous()
'''

SUMMED = '''
def summed(tensor, shape):
    """The sum of what the ranks hold."""
    total = torch.zeros(shape) if tensor is None else tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total
'''

DIFFERS = '''
def differs(name, actual, expected):
    """Print what this rank holds beside what one device computes."""
    same = actual is not None and actual.shape == expected.shape
    same = same and torch.allclose(actual.double(), expected.double(), rtol=0, atol=ATOL)
    got = None if actual is None else actual.tolist()
    told = "" if same else "  <-- differs"
    print(f"rank {dist.get_rank()}: {name}: expected {expected.tolist()}, got {got}{told}\\n", end="", flush=True)
    return not same
'''


RIGHT_HERE = "In simulation the numbers below came out right: what is wrong need not show in them."


def script(subject: Subject, case: Case, world: str) -> str:
    """A Python program that runs a case on gloo processes and exits 1 if their tensors differ from the reference's.

    Args:
        world: what executes the ranks when the checks look for what is wrong.

    Raises:
        CaseError: the case is one that no script can show, or holds too many numbers.
        SubjectError: nothing says how the module is built, or the subject contradicts itself.
    """
    how = construction(subject, case)
    return _Source(facts_of(subject, case, world), how).text()


class _Source:
    """The text of one script."""

    def __init__(self, facts: Facts, how: Construction) -> None:
        self.facts = facts
        self.how = how
        self.dtype = facts.subject.working_dtype(facts.case.dtype)
        self.literals = Literals(facts.case.world_size, self.dtype)
        self.names = {name: _variable(name) for name in facts.logical.specs}

    def text(self) -> str:
        """The program."""
        statements = [f"    {line}" if line else "" for line in self._body()]
        body = "\n".join(line for statement in statements for line in self.literals.statement(statement))
        helpers = ([PART] if self.literals.uses_part else []) + ([SUMMED] if "summed(" in body else [])
        helpers += [text for name, (_, text) in LAYOUTS.items() if f"{name}(" in body]
        helpers += [DIFFERS] if self.facts.compared else []
        sections = [
            f'"""{self._docstring()}"""',
            self._imports(),
            self._constants(),
            *("\n" + text.strip("\n") + "\n" for text in (self.how.code, *helpers)),
            f"\ndef run(rank, folder, wrong):\n{body}\n",
            MAIN,
        ]
        return "\n".join(sections)

    def _docstring(self) -> str:
        facts, case = self.facts, self.facts.case
        library = library_of(facts.subject.name)
        used = f"{library.distribution} {library.version}, " if library else ""
        found = [f"{violation.check}: {_summary(violation.message)}" for violation in facts.violations]
        paragraphs = [f"{facts.subject.name} on {case.world_size} rank{'s' * (case.world_size > 1)} ({used}torch {torch.__version__})."]
        paragraphs += list(dict.fromkeys(found)) or ["All checks hold."]
        if facts.violations and not facts.shown:
            paragraphs.append(RIGHT_HERE)
        if self.how.modules:
            paragraphs.append(f"It imports {', '.join(self.how.modules)}, and with it whatever that imports.")
        paragraphs.append(
            "It runs on CPUs, over gloo; its exit code is 1 if a rank raises or holds other numbers than one device computes."
        )
        wrapped = [textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False) for text in paragraphs]
        made = f"Written by tpverify {tpverify.__version__} for\n{case!r}"
        return "\n\n".join([*wrapped, made]).replace("\\", "\\\\").replace('"""', "'''") + "\n"

    def _imports(self) -> str:
        lines = dict.fromkeys([*IMPORTS, *self.how.imports])
        standard = [line for line in lines if re.split(r"[ .]", line)[1] in sys.stdlib_module_names]
        return "\n".join(["", *standard, "", *(line for line in lines if line not in standard), ""])

    def _constants(self) -> str:
        lines = [f"WORLD_SIZE = {self.facts.case.world_size}"]
        if self.facts.compared:
            lines.append(f"ATOL = {self.facts.tolerance:.1e}  # what rounding explains" if self.facts.tolerance else "ATOL = 0  # exact")
        return "\n".join([*lines, ""])

    def _body(self) -> Iterator[str]:
        facts = self.facts
        yield f'dist.init_process_group("gloo", f"file://{{folder}}/store", timedelta(seconds={TIMEOUT}), WORLD_SIZE, rank)'
        yield f"torch.set_default_dtype({self.dtype})"
        yield "module = build()"
        yield from self._load(first=True)
        yield ""
        calls: list[str] = []
        in_order(
            facts.case,
            lambda call: calls.extend(self._forward(call)),
            lambda call: calls.extend(self._backward(call)),
            lambda: calls.extend(["", *self._load(first=False)]),
        )
        yield from calls
        if facts.subject.finalize_gradients is not None:
            yield "finalize_gradients(module)"
        yield from self._compare([each for each in facts.compared if each.label.endswith(".grad")])
        yield "dist.destroy_process_group()"

    def _load(self, first: bool) -> Iterator[str]:
        """Statements that copy the ranks' parts of the parameters in."""
        built = self.facts.built
        if built is None or not built.placements:
            return
        yield "with torch.no_grad():" if first else "with torch.no_grad():  # as after a step of an optimizer"
        for name, placement in built.placements.items():
            logical = (self.facts.logical.parameters if first else self.facts.logical.stepped)[name]
            yield f"    {self._parameter(name)}.copy_({self.literals.of(logical, placement.value)})"

    def _parameter(self, name: str, gradient: bool = False) -> str:
        assert self.facts.built is not None
        whole = (f"module.{name}" if name.isidentifier() else f"module.get_parameter({name!r})") + (".grad" if gradient else "")
        return f"{whole}.to_local()" if name in self.facts.built.distributed else whole

    def _forward(self, call: int) -> Iterator[str]:
        logical = self.facts.logical
        for name, spec in logical.specs.items():
            expression = self.literals.of(logical.inputs[call][name], spec.placements.value)
            if spec.kind == "normal":
                expression = laid_out(expression, spec.shape, self.facts.case.layout)
            yield f"{_of_call(self.names[name], call)} = {expression}{'.requires_grad_()' if spec.requires_grad else ''}"
        arguments = ", ".join(_of_call(name, call) for name in self.names.values())
        yield f"{_of_call('output', call)} = module({arguments})"
        yield from self._compare([each for each in self._outputs(call) if not each.late])

    def _backward(self, call: int) -> Iterator[str]:
        """Statements that start backward from the cotangents, where the outputs have their shapes."""
        logical = self.facts.logical
        outputs = list(zip(logical.cotangents[call].items(), self.facts.returned, strict=False))
        if len(outputs) < len(logical.cotangents[call]):
            raise CaseError(f"Expected the module to return {', '.join(logical.cotangents[call])} but got {len(outputs)} tensors")
        roots, starts = [], []
        for (label, cotangent), returned in outputs:
            layout = self.facts.outputs[label].of_gradient
            if returned.starts_backward and self._fits(returned, cotangent, layout):
                roots.append(self._output(returned, call))
                expression = self.literals.of(cotangent, layout)
                starts.append(laid_out(expression, cotangent.shape, self.facts.case.layout))
        if len(roots) == 1:
            yield f"{roots[0]}.backward({starts[0]})"
        elif roots:
            yield "torch.autograd.backward("
            yield f"    [{', '.join(roots)}],"
            yield from (f"    {'[' * (not n)}{start}{'],' if n == len(starts) - 1 else ','}" for n, start in enumerate(starts))
            yield ")"
        yield from self._compare([each for each in self._outputs(call) if each.late])

    def _fits(self, returned: Returned, cotangent: torch.Tensor, layout: Layout) -> bool:
        unknown = self.facts.built is None or self.facts.built.returned is None
        return unknown or returned.shape == local_shape(cotangent.shape, layout, 0, self.facts.case.world_size)

    def _outputs(self, call: int) -> list[Compared]:
        labels = [call_label(label, call) for label in self.facts.logical.cotangents[call]]
        return [each for each in self.facts.compared if each.label in labels]

    def _output(self, returned: Returned, call: int) -> str:
        return f"{_of_call('output', call)}{returned.path}{'.to_local()' if returned.distributed else ''}"

    def _compare(self, compared: list[Compared]) -> Iterator[str]:
        for each in compared:
            actual = self._actual(each.label)
            if each.expected is None:
                shape = tuple(self._logical_shape(each.label))
                yield f"expected = {self.literals.of(torch.zeros(shape), each.layout)}  # none"
                yield f"wrong[rank] += differs({each.label!r}, expected if {actual} is None else {actual}, expected)"
                continue
            layout = each.layout
            if isinstance(layout, Partial):
                actual, layout = f"summed({actual}, {tuple(each.expected.shape)})", Replicate()
            yield f'wrong[rank] += differs("{each.label}", {actual}, {self.literals.of(each.expected, layout)})'

    def _logical_shape(self, label: str) -> torch.Size:
        name = label.removesuffix(".grad")
        labelled = self.facts.logical.labelled_inputs
        return (labelled[name] if name in labelled else self.facts.logical.parameters[name]).shape

    def _actual(self, label: str) -> str:
        """An expression for the rank's own tensor of a label."""
        for call in range(self.facts.case.call_count):
            for name, variable in self.names.items():
                if label == f"{call_label(name, call)}.grad":
                    return f"{_of_call(variable, call)}.grad"
            for known, returned in zip(self.facts.logical.cotangents[call], self.facts.returned, strict=False):
                if label == call_label(known, call):
                    return self._output(returned, call)
        return self._parameter(label.removesuffix(".grad"), gradient=True)


MAIN = """
if __name__ == "__main__":
    wrong = torch.zeros(WORLD_SIZE).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, wrong), nprocs=WORLD_SIZE)
    sys.exit(int(wrong.any()))
"""


def _variable(name: str) -> str:
    """A name for a local variable."""
    name = re.sub(r"\W", "_", name)
    return f"{name}_" if name in RESERVED or keyword.iskeyword(name) or not name.isidentifier() else name


def _of_call(name: str, call: int) -> str:
    return f"{name}_{call + 1}" if call else name


def _summary(message: str) -> str:
    """What a violation says, without tracebacks."""
    first, *rest = message.splitlines()
    if any(line.startswith("Traceback") for line in rest):
        return f"{first}: {rest[-1].strip()}"
    return f"{first} {'; '.join(line.strip() for line in rest)}" if first.endswith(":") else first
