"""Load a model class of transformers: from its files, and from a catalog as its state dict."""

import os

from benchmarks.contender import Contender, Job, Workload

__all__ = ["WORKLOAD"]


def _prepare(job: Job):
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = job.model
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=4 * model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.hidden // 32,
        num_key_value_heads=model.hidden // 32,
        vocab_size=model.vocabulary,
        tie_word_embeddings=False,
    )
    # Some versions fall over a directory without it.
    GenerationConfig().save_pretrained(os.path.dirname(job.source))
    return LlamaForCausalLM, config, torch.bfloat16, job.source


def _from_files(prepared):
    kind, config, dtype, source = prepared
    return kind.from_pretrained(os.path.dirname(source), config=config, dtype=dtype)


def _prepare_catalog(job: Job):
    import ml_dtypes  # noqa: F401

    import weighlock.formats.detect  # noqa: F401

    return _prepare(job)


def _from_catalog(prepared):
    import weighlock

    kind, config, dtype, source = prepared
    return kind.from_pretrained(None, config=config, dtype=dtype, state_dict=weighlock.open(source))


def _check(job, prepared, result):
    import torch

    state = result.state_dict()
    for name, array in job.model.arrays().items():
        assert (state[name].view(torch.uint16).numpy() == array).all(), name


WORKLOAD = Workload(
    "transformers",
    "transformers from_pretrained, from files and from a catalog",
    (
        Contender("from_pretrained(directory)", _from_files, _prepare, _check, ("transformers",)),
        Contender("state_dict=catalog", _from_catalog, _prepare_catalog, _check, ("transformers",)),
    ),
    fills_memory=True,
    note=lambda: (
        "The directory is mapped: next to nothing of it is read within the time, and the first use "
        "of each weight waits for it. From a catalog all of it is read."
    ),
)
