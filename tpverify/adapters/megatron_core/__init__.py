"""megatron-core's tensor-parallel layers, mappings, losses and models as subjects."""

from tpverify.adapters.megatron_core import attention, latent_attention, layers, losses, mappings, mlp, models, moe

SUBJECTS = {
    name: subject
    for module in (layers, losses, mappings, mlp, attention, latent_attention, models, moe)
    for name, subject in module.SUBJECTS.items()
}
