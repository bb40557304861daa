"""Errors tell four things: the operation, what came in, what is allowed, what to do."""

from __future__ import annotations

import copy
import pickle

import pytest

from te_core import ArgumentError, LibraryError, UnsupportedError
from te_core.backends.cuda.cublaslt import CublasLtError
from te_core.errors import MissingPackageError
from tests.refusals import says_more

PARTS = ("gemm", "a (3, 4)", "equal contraction sizes", "check the shapes")
KINDS = {ArgumentError: ValueError, UnsupportedError: RuntimeError, LibraryError: RuntimeError}


@pytest.mark.parametrize("kind", KINDS)
def test_the_message_has_four_parts_in_order(kind):
    error = kind(*PARTS)
    assert str(error) == "gemm: got a (3, 4). Allowed: equal contraction sizes. To do: check the shapes."
    assert (error.operation, error.got, error.allowed, error.do) == PARTS


@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_who_knows_only_python_catches_it(kind):
    with pytest.raises(KINDS[kind], match="^gemm: got a"):
        raise kind(*PARTS)
    assert not issubclass(kind, tuple(other for other in KINDS if other is not kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_it_survives_the_way_between_processes(kind, again):
    error = again(kind(*PARTS))
    assert type(error) is kind and str(error) == str(kind(*PARTS))
    assert (error.operation, error.got, error.allowed, error.do) == PARTS


@pytest.mark.parametrize("kind", KINDS)
def test_no_part_can_be_left_out(kind):
    with pytest.raises(TypeError, match="four parts, or one text"):
        kind("gemm", "a (3, 4)", "equal contraction sizes")


def test_every_error_can_be_made_from_one_text():
    for kind in (*KINDS, MissingPackageError, CublasLtError):
        assert says_more(kind), kind


def test_what_a_library_sets_survives_too():
    error = MissingPackageError(*PARTS)
    error.name = "cupy"
    assert pickle.loads(pickle.dumps(error)).name == "cupy"
    assert CublasLtError("cublasLtMatmul", 7).status == pickle.loads(pickle.dumps(CublasLtError("create", 7))).status
