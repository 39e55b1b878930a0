"""What the source of an Atropos environment tells without running it: `trl_atropos.check` reads it with `ast`.

Only the file that is started is read. What cannot be told for certain (settings computed elsewhere, classes of other
files) counts as unknown, and nothing is said of it.
"""

import ast
from dataclasses import dataclass, field
from typing import Any

BASE = "BaseEnv"
BASE_CONFIG = "BaseEnvConfig"
SERVER_CONFIGS = ("APIServerConfig", "ServerBaseline")
CHAT = ("chat_completion", "apply_chat_template")
UNKNOWN = object()  # in place of a value that is computed
"""Never equal to a setting, and never shown."""

Classes = dict[str, ast.ClassDef]


@dataclass
class EnvironmentCode:
    """
    Attributes:
        single_server: Line at which `config_init` returns one server config in place of a list; `None` if it does
            not, or if that is not known.
        servers: How many server configs it returns in a list; `None` if that is not known.
        settings: Keyword arguments of the environment's config in `config_init`; `UNKNOWN` those that are no literals.
        server_settings: The same of the server configs.
        fields: Fields of the environment's config class besides Atropos' own, with their defaults. `None` if the class
            is not known as a whole.
        tokenizes: Line and name of each call that expects token ids from `apply_chat_template` as transformers 4
            returned them.
        chats: Line of the first call that needs a chat template.
        one_by_one: Line of a `collect_trajectory` that Atropos' own `collect_trajectories` calls, which does not hand
            on log-probabilities.
    """

    single_server: int | None = None
    servers: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    server_settings: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] | None = None
    tokenizes: list[tuple[int, str]] = field(default_factory=list)
    chats: int | None = None
    one_by_one: int | None = None


def read_environment(source: str) -> EnvironmentCode:
    """Raises `SyntaxError` or `ValueError` for what this Python cannot parse."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    code = EnvironmentCode(tokenizes=[found for node in calls if (found := _tokenizes(node))])
    code.chats = min((node.lineno for node in calls if _name(node.func) in CHAT), default=None)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    started = _started_class(tree, classes)
    if started is None:
        return code
    single, _ = _method("collect_trajectory", started, classes)
    whole, is_base = _method("collect_trajectories", started, classes)
    code.one_by_one = single.lineno if single is not None and whole is None and is_base else None
    config_init, is_base = _method("config_init", started, classes)
    if config_init is None:
        code.single_server = started.lineno if is_base else None
        return code
    _read_config_init(code, config_init, started, classes)
    return code


def _read_config_init(code: EnvironmentCode, config_init: ast.AST, started: ast.ClassDef, classes: Classes) -> None:
    names = set()
    for node in ast.walk(config_init):
        if isinstance(node, ast.Call) and _is_config(name := _name(node.func), classes):
            settings = code.server_settings if name in SERVER_CONFIGS else code.settings
            settings |= {keyword.arg or "": _literal(keyword.value) for keyword in node.keywords}
            names |= set() if name in SERVER_CONFIGS else {_class_attribute("env_config_cls", name, started)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):  # `config.group_size = ...`
            code.settings[node.attr] = code.server_settings[node.attr] = UNKNOWN
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            *_env, servers = node.value.elts
            code.single_server = node.lineno if _is_single(servers, config_init) else code.single_server
            assigned = _assigned(servers, config_init) if isinstance(servers, ast.Name) else [servers]
            servers = assigned[0] if len(assigned) == 1 else None
            if isinstance(servers, ast.List) and not any(isinstance(one, ast.Starred) for one in servers.elts):
                code.servers = len(servers.elts)
    if len(names) == 1 and "" not in code.settings:  # no `**settings`
        code.fields = read_fields(names.pop(), classes)


def _is_config(name: str, classes: Classes) -> bool:
    return name.endswith(("Config", "env_config_cls", "Baseline")) or read_fields(name, classes) is not None


def _class_attribute(attribute: str, name: str, one: ast.ClassDef) -> str:
    """`name`, or if that is a class attribute (`cls.env_config_cls(...)`), the class that it names."""
    for part in one.body if name == attribute else []:
        if isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None:
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            if any(_name(target) == attribute for target in targets):
                return _name(part.value)
    return name


def read_fields(name: str, classes: Classes, root: str = BASE_CONFIG) -> dict[str, Any] | None:
    """Fields of a pydantic class and its bases in this file, with their defaults; `None` if a base is elsewhere."""
    if name == root and name not in classes:
        return {}
    if name not in classes or not classes[name].bases:
        return None
    found: dict[str, Any] = {}
    for base in classes[name].bases:
        inherited = read_fields(_name(base), {one: it for one, it in classes.items() if one != name}, root)
        if inherited is None:
            return None
        found |= inherited
    for part in classes[name].body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found[part.target.id] = _default(part.value)
        elif isinstance(part, ast.Assign):
            found |= {target.id: _default(part.value) for target in part.targets if isinstance(target, ast.Name)}
    return found


def read_class(source: str, name: str) -> dict[str, Any]:
    """The fields of a class in a file of Atropos' own. Empty if they cannot be told."""
    classes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    return read_fields(name, classes, root="BaseModel") or {}


def _default(value: ast.expr | None) -> Any:
    """Of `= 3`, `= Field(3)` and `= Field(default=3)`."""
    if isinstance(value, ast.Call) and _name(value.func) == "Field":
        stated = [keyword.value for keyword in value.keywords if keyword.arg == "default"] or value.args[:1]
        return _literal(stated[0]) if stated else UNKNOWN
    return UNKNOWN if value is None else _literal(value)


def _literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        return UNKNOWN


def _started_class(tree: ast.Module, classes: Classes) -> ast.ClassDef | None:
    """The class whose `cli()` is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cli":
            return classes.get(_name(node.func.value))
    return None


def _method(name: str, one: ast.ClassDef, classes: Classes) -> tuple[ast.AST | None, bool]:
    """A method of a class or its bases in this file; if there is none, whether it is the base environment's."""
    for part in one.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == name:
            return part, False
    bases = [_name(base) for base in one.bases]
    for base in bases:
        if base in classes and classes[base] is not one:
            return _method(name, classes[base], classes)
    return None, bases == [BASE]


def _is_single(value: ast.expr, function: ast.AST) -> bool:
    """Whether an expression surely is one server config."""
    if isinstance(value, ast.Call):
        return _name(value.func) in SERVER_CONFIGS
    if isinstance(value, ast.Name):
        assigned = _assigned(value, function)
        return bool(assigned) and all(one is not None and _is_single(one, function) for one in assigned)
    return False


def _assigned(name: ast.Name, function: ast.AST) -> list[ast.expr | None]:
    """Everything that a function assigns to a variable."""
    assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [(node.targets if isinstance(node, ast.Assign) else [node.target], node.value) for node in assignments]
    return [value for to, value in targets if any(_name(target) == name.id for target in to)]


def _tokenizes(node: ast.Call) -> tuple[int, str] | None:
    name = _name(node.func)
    if name == "tokenize_for_trainer":
        return node.lineno, name
    stated = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name == "apply_chat_template" and stated.get("tokenize") != "False" and "return_dict" not in stated:
        return node.lineno, name
    return None


def _name(node: ast.AST) -> str:
    """The last part of a dotted name; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
