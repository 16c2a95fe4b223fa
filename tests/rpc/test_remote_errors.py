import builtins
import dataclasses
import pickle

import pytest

from replicator.errors import EncodeError, RemoteError, RpcError
from replicator.rpc.codec.registry import Registry
from replicator.rpc.remote_errors import (
    MAX_TEXT_BYTES,
    ErrorInfo,
    describe_error,
    remote_error,
)

EXCEPTIONS = {
    name: cls
    for name, cls in vars(builtins).items()
    if isinstance(cls, type) and issubclass(cls, BaseException)
}
# These end a program, or hold other exceptions.
PLAIN = {
    "BaseException",
    "BaseExceptionGroup",
    "ExceptionGroup",
    "GeneratorExit",
    "KeyboardInterrupt",
    "SystemExit",
}


def rebuilt(told, registry=None):
    return remote_error(
        told,
        method="add",
        server="'counter' (process 7)",
        address="unix:/x",
        registry=registry or Registry(),
    )


def told_of(raise_it, registry=None):
    try:
        raise_it()
    except BaseException as error:
        return describe_error(error, registry=registry or Registry())


def travelled(error, registry=None):
    def raise_it():
        raise error

    return rebuilt(told_of(raise_it, registry), registry)


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_each_builtin_is_raised_as_itself_and_as_a_remote_error(name):
    error = rebuilt(ErrorInfo([name, "Exception"], "the text"))
    assert isinstance(error, RemoteError)
    is_plain = name in PLAIN and name != "BaseException"
    assert isinstance(error, EXCEPTIONS[name]) != is_plain
    assert str(error).startswith("the text (raised by `add` of 'counter'")
    assert error.type_name == name


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_a_remote_error_survives_pickling(name):
    error = rebuilt(ErrorInfo([name], "the text", "the traceback"))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_what_ends_a_program_is_an_exception_at_the_caller(name):
    error = rebuilt(ErrorInfo([name], ""))
    assert type(error) is RemoteError
    assert error.type_name == name


def test_an_unknown_type_is_the_nearest_known_one():
    class Odd(KeyError):
        pass

    error = travelled(Odd("k"))
    assert isinstance(error, KeyError)
    assert error.type_name == "Odd"
    assert "'k'" in str(error)


def test_a_registered_type_is_itself_with_its_attributes():
    registry = Registry()

    @registry.register
    class OutOfStock(LookupError):
        def __init__(self, item, left):
            super().__init__(f"no {item}")
            self.item, self.left = item, left

    error = travelled(OutOfStock("pears", 2), registry)
    assert isinstance(error, OutOfStock)
    assert (error.item, error.left, error.type_name) == ("pears", 2, "OutOfStock")


def test_a_type_registered_on_one_side_only_is_the_nearest_known_one():
    registry = Registry()

    @registry.register
    class OutOfStock(LookupError):
        pass

    told = told_of(lambda: travelled(OutOfStock("pears"), registry))
    error = rebuilt(describe_error(OutOfStock("pears"), registry=registry))
    assert told is None
    assert isinstance(error, LookupError)
    assert not isinstance(error, OutOfStock)


def test_a_name_that_hides_a_builtin_does_not_confuse_the_two():
    registry = Registry()
    mine = registry.register(type("ValueError", (Exception,), {}))
    assert not isinstance(travelled(ValueError("x"), registry), mine)
    assert isinstance(travelled(mine("x"), registry), mine)


@pytest.mark.parametrize(
    "name", ["print", "__import__", "os.system", "Registry", "int"]
)
def test_a_name_on_the_wire_is_looked_up_among_exceptions_only(name):
    assert type(rebuilt(ErrorInfo([name], "text"))) is RemoteError


def test_the_errno_of_a_system_error_travels():
    with pytest.raises(FileNotFoundError) as caught:
        raise travelled(FileNotFoundError(2, "No such file", "/nowhere"))
    assert caught.value.errno == 2
    assert "/nowhere" in str(caught.value)


def test_an_error_of_the_codec_is_one_at_the_caller_too():
    assert isinstance(travelled(EncodeError("`value[0]`")), EncodeError)


class Bad(ValueError):
    def __str__(self):
        raise SystemExit(3)

    __repr__ = __str__


def test_a_type_that_cannot_show_itself_is_told_all_the_same():
    error = travelled(Bad())
    assert isinstance(error, ValueError)
    assert "<Bad, whose `__str__` and `__repr__` raise>" in str(error)


@pytest.mark.parametrize("text", ["x" * 10**7, "é" * 10**5, "\ud800" * 10**5])
def test_text_is_bounded_and_can_be_encoded(text):
    told = told_of(lambda: exec("raise ValueError(text)", {"text": text}))
    assert 1000 < len(told.text.encode()) <= MAX_TEXT_BYTES
    assert 1000 < len(told.traceback.encode()) <= MAX_TEXT_BYTES


def test_a_long_traceback_keeps_its_end():
    def deep(n):
        return deep(n - 1) if n else 1 / 0

    told = told_of(lambda: deep(400))
    assert told.traceback.rstrip().endswith("ZeroDivisionError: division by zero")


def test_the_traceback_holds_causes_and_notes():
    def with_cause():
        try:
            {}["missing"]
        except KeyError as error:
            new = ValueError("second")
            new.add_note("a note")
            raise new from error

    told = told_of(with_cause)
    for part in ("KeyError: 'missing'", "direct cause", "ValueError: second", "a note"):
        assert part in told.traceback


def test_the_remote_traceback_is_shown_with_the_error():
    error = travelled(ValueError("bad"))
    assert error.remote_traceback in "".join(error.__notes__) + "\n"
    assert error.server == "'counter' (process 7)"


def test_an_error_without_text_is_named():
    assert str(travelled(KeyError())).startswith("KeyError (raised by")


def test_errors_of_one_type_share_a_class():
    assert type(rebuilt(ErrorInfo(["OSError"], "a"))) is type(
        rebuilt(ErrorInfo(["OSError"], "b"))
    )


def test_a_remote_error_is_an_error_of_rpc():
    assert isinstance(travelled(ValueError("x")), RpcError)


def test_a_dataclass_can_be_an_exception():
    registry = Registry()

    @registry.register
    @dataclasses.dataclass
    class Refused(Exception):
        code: int

    error = travelled(Refused(7), registry)
    assert isinstance(error, Refused)
    assert error.code == 7


def test_what_another_process_says_is_no_command_to_a_terminal():
    told = ErrorInfo(
        ["\x1b]0;a\x07"], "a\x1b[2J\tb\r\nc\x9b2J", "line 1\n\x1b[8m", None
    )
    error = rebuilt(told)
    shown = [str(error), error.type_name, error.remote_traceback, *error.__notes__]
    assert not any(set("".join(shown)) & set("\x1b\x07\r\x9b"))
    assert str(error).startswith("a\\x1b[2J\tb\\x0d\nc\\x9b2J (raised")
