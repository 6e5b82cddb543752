"""Functions that compute recurrences, and how ranks share each: the table, and the way to add one.

    out, final = chunk_gated_delta_rule(q, k, v, g, beta)      of all tokens
      =>
    out0, b, Q, M                                              of this rank's, in one call
    before = pass_states(b, matrix=M)                          one gather, whatever the length
    out = out0 + Q @ before

A form takes a function and its arguments, by their names, and calls the function on this rank's
tokens. Forms use nothing but `pass_states` and `tokens_before`; so does a user's own, which
`register_recurrence` adds.

A module finds such functions as globals of Python modules, or as its attributes. There
`share_functions` puts one that asks whether the tokens it is given are a rank's part. If they are
not, it calls the function itself.

The functions that are known without being registered, and their forms, are in `integrations`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import nn

from cp_inductor.errors import InvalidArgument
from cp_inductor.modules.along_sequence import shared_sequence
from cp_inductor.modules.reading import computing, computing_with

Form = Callable[..., Any]


# By the package that defines a function, which need not be installed, and by its name.
forms_of_packages: dict[str, Mapping[str, Form]] = {}
# By the function's id.
_registered: dict[int, tuple[Any, Form]] = {}


def register_recurrence(function: Callable[..., Any], form: Form) -> None:
    """Say how ranks share a function that computes a recurrence.

    Call it before `parallelize`, where `recurrent=` names the modules that call the function. They
    find it as a global of any Python module, or as an attribute of theirs: not in a container, nor
    within a partial.

    Args:
        function: of all tokens, or of a rank's. It takes no ``*args``. Functions that it calls are
            not shared a second time, if they are known, too.
        form: is called instead of `function` for a rank's tokens: ``form(function, **arguments)``.
            It uses `pass_states` and `tokens_before`.

    Raises:
        InvalidArgument: the function takes positional arguments without names.
    """
    _names_of(function)
    original = cast("Any", function).__wrapped__ if _form_in(function) else function
    _registered[id(original)] = original, form


def share_functions(
    modules: Iterable[nn.Module], named: Mapping[str, Form], *, is_everywhere: bool
) -> None:
    """Put functions that compute a rank's part of a shared sequence in the place of known ones.

    Args:
        modules: whose methods find them as globals. These may be those of no Python module:
            multiprocessing runs a script again, and copies what it defines into a module.
        named: forms of functions that are known under their names there alone.
        is_everywhere: whether attributes of `modules`, and globals of all Python modules, are
            replaced as well.
    """
    loaded = list(sys.modules.values()) if is_everywhere else []
    namespaces: list[Any] = [vars(home) for home in loaded if isinstance(home, ModuleType)]
    for module in modules:
        methods = [value for base in type(module).__mro__ for value in vars(base).values()]
        called = [inspect.unwrap(method) for method in methods if callable(method)]
        namespaces += [getattr(method, "__globals__", None) for method in called]
        namespaces += [vars(module)] if is_everywhere else []
    for namespace in {id(home): home for home in namespaces if home is not None}.values():
        for name, value in list(namespace.items()):
            shared_by = _form_in(value)
            original = value.__wrapped__ if shared_by else value
            form = named.get(name) or _form_of(original)
            if form is not None and shared_by is not form:
                namespace[name] = _sharing(original, form)


def _form_in(value: Any) -> Form | None:
    return vars(value).get("_cp_form") if type(value) is FunctionType else None


def _form_of(value: Any) -> Form | None:
    # Objects of any kind: what some of them do if they are asked for an attribute, nobody knows.
    if id(value) in _registered:
        return _registered[id(value)][1]
    if not issubclass(type(value), (FunctionType, BuiltinFunctionType, MethodType)):
        return None
    module = getattr(value, "__module__", None)
    if not isinstance(module, str):  # that of a builtin may be a module
        return None
    forms = forms_of_packages.get(module.partition(".")[0], {})
    return forms.get(getattr(value, "__name__", ""))


def _sharing(function: Any, form: Form) -> Any:
    names = _names_of(function)

    @functools.wraps(function)
    def own(*args: Any, **kwargs: Any) -> Any:
        # What the function calls is part of it: the form passes its states, too.
        with computing_with(is_in_form=True):
            return function(*args, **kwargs)

    @functools.wraps(function)
    def shared(*args: Any, **kwargs: Any) -> Any:
        if shared_sequence() is None or computing().is_in_form:
            return function(*args, **kwargs)
        return form(own, **dict(zip(names, args, strict=False)), **kwargs)

    shared._cp_form = form  # type: ignore[attr-defined]
    return shared


def _names_of(function: Any) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        raise InvalidArgument(
            site=f"register_recurrence({getattr(function, '__name__', type(function).__name__)})",
            expected="a function whose arguments have names",
            got="one that takes *args",
            remedy="wrap it in a function that names them",
        )
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
