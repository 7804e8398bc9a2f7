"""Which files of the CPU tier are run here too, by which test, and why the others are not; and what rank processes import of them."""

from __future__ import annotations

from dataclasses import replace

from planted_processes import Behaviour as Behaviour
from planted_processes import behaving as behaving
from test_calls import GatherOnce as GatherOnce
from test_calls import HookOnAccumulated, HookOnGradient, SharedBuffer, StaleCache, gathering, hooked
from test_dtensor_subjects import plain_norm, without_reduction

import tpverify as tpv
from tpverify.subjects.dtensor_llama import dtensor_llama
from tpverify.subjects.dtensor_mlp import dtensor_mlp

# Rank processes find a subject as an attribute of a module; these have no name in the modules that make them.
gather_in_every_call: tpv.Subject = gathering(GatherOnce)
hook_on_gradient: tpv.Subject = hooked(HookOnGradient)
stale_cache: tpv.Subject = gathering(StaleCache)
shared_buffer: tpv.Subject = gathering(SharedBuffer)
hook_on_accumulated: tpv.Subject = hooked(HookOnAccumulated)
plan_without_reduction = replace(dtensor_mlp, parallel=without_reduction)
plan_with_plain_norm = replace(dtensor_llama, parallel=plain_norm)

REUSED = {
    "test_subjects.py": "test_subjects.py: the same subjects over every place",
    "test_identities.py": "test_subjects.py: twice in a row, and small integers exactly; schedules and orders are the simulator's",
    "test_hard_cases.py": "test_planted.py: the same cases",
    "test_calls.py": "test_planted.py: what is right and what is wrong from the second call on",
    "test_dtensor_subjects.py": "test_planted.py: the same wrong plans; the green path is in test_subjects.py",
    "test_dtensor_linear.py": "test_subjects.py: the same subject over every place",
    "test_mutants.py": "test_planted.py: of the catalogue one bug of each kind for each check that must find it",
    "test_controls.py": "test_planted.py: the same controls",
    "test_conformance.py": "test_conformance.py: programs that every backend takes, on this device",
    "test_low_precision.py": "test_low_precision.py: the same checks in the same dtypes",
    "test_planted_bugs.py": "test_planted.py: the same bugs, by the same checks",
    "test_planted_mismatches.py": "test_planted.py: the same schedules, named by the same check",
    "test_planted_survey.py": "test_planted.py: the same bugs, by the same checks",
    "test_teaching_block.py": "test_planted.py: as published and corrected",
    "test_processes.py": "test_planted.py: ranks that raise, die or leave, over NCCL and on CUDA tensors",
    "test_processes_meshes.py": "test_subjects.py: DTensor subjects, in one TP group and in two, in the same processes",
    "test_simulator_gloo.py": "test_conformance.py: every collective, simulated and real",
}
"""By file of properties/, what stands for it here."""

NOT_REUSED = {
    "test_adequacy.py": "asks how good the cases are, which no device changes",
    "test_torchrun.py": "starts jobs of its own, one process a rank, over gloo",
    "test_collectives.py": "calls simulate(): the same collectives run as programs in test_conformance.py",
    "test_ledger.py": "pure functions of records, which no device changes",
    "test_processes_messages.py": "how processes talk, before any tensor is on a device",
    "test_module_state.py": "what a run leaves in a module comes back to the CPU from any device",
    "test_repair.py": "repairs are tried in the simulator, whatever found the failure",
    "test_diagnosis.py": "what is said of a case, in the simulator, whatever found it",
    "test_rounding.py": "how the reference rounds at random, in the second look that test_low_precision.py takes here too",
    "test_dtensor_meshes.py": "how the placement of a DTensor is read, whatever the device",
    "test_drawing.py": "sizes that are drawn, which no device changes",
    "test_sharding.py": "pure functions of tensors on the CPU",
    "test_simulator.py": "the scheduler, which knows no device",
    "test_simulator_contract.py": "the simulator's contract, call by call; its values are in test_conformance.py",
    "test_simulator_isolation.py": "what ranks in one process share; processes share nothing",
    "test_simulator_rank_local.py": "modules swapped with the baton; processes have their own",
    "test_simulator_reuse.py": "what ranks in one process take over from earlier runs; processes are themselves kept",
    "test_simulator_torch.py": "which torch interfaces reach the simulator, which no device changes",
    "test_subjects_figures.py": "arithmetic on published figures",
    "test_tolerance.py": "pure functions of tensors on the CPU",
}
"""By file of properties/, why it is not run here."""
