"""What the fork server of helpers.py imports once, for all processes that it forks."""

import functools
import importlib
from importlib.machinery import SourceFileLoader

NAMES = """helpers torch._dynamo train_ddp run_dpo_ddp run_train_uniref50_ddp
    run_train_quantumgrav_ddp run_train_rebm_ddp test_ddp_setup runs matplotlib.pyplot
    sklearn.decomposition sklearn.metrics sentence_transformers""".split()


@functools.cache
def compile_once(data, path):
    return compile(data, path, "exec", dont_inherit=True)


def source_to_code(loader, data, path):
    """Compiling a script takes longer than most of the steps that a test makes."""
    return compile_once(bytes(data), path)


SourceFileLoader.source_to_code = source_to_code
for name in NAMES:
    importlib.import_module(name)
