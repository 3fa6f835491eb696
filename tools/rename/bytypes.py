"""Attributes and parameters, resolved by mypy's types: {file: [(line, byte column, old, new)]}."""

import ast
import re
import sys
import time
from pathlib import Path

from mypy import build as mypy_build
from mypy.modulefinder import BuildSource
from mypy.nodes import (ARG_NAMED, CallExpr, ClassDef, Decorator, FuncDef, MemberExpr, NameExpr, Node, OverloadedFuncDef,
                        RefExpr, StrExpr, TypeInfo, Var)
from mypy.options import Options
from mypy.patterns import ClassPattern
from mypy.types import (AnyType, CallableType, Instance, NoneType, Overloaded, TupleType, TypeType, TypeVarType, UnionType,
                        get_proper_type)


def sources(root):
    found, taken = [], set()
    for path in sorted((root / "src").rglob("*.py")):
        parts = list(path.relative_to(root / "src").with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found.append((path, ".".join(parts)))
    for place in ("tests", "benchmarks", "training", "tools", "examples"):
        for path in sorted((root / place).rglob("*.py")):
            parts, above = [path.stem], path.parent
            while (above / "__init__.py").exists() and above != root:
                parts.insert(0, above.name)
                above = above.parent
            if place == "benchmarks":
                parts = list(path.relative_to(root).with_suffix("").parts)
            name = ".".join(parts).removesuffix(".__init__")
            if name in taken or name == "conftest":
                name = "_".join(path.relative_to(root).with_suffix("").parts)
            taken.add(name)
            found.append((path, name))
    return found


def real(info):
    """A class, or None where mypy has put its placeholder."""
    return info if isinstance(info, TypeInfo) and type(info).__name__ != "FakeInfo" else None


SKIPPED = {"node", "info", "type", "unanalyzed_type", "analyzed", "var", "original_def", "def_frame", "names", "deps", "imports",
           "type_annotation", "definition", "metaclass_type", "alias_defs", "future_import_flags", "expanded", "type_args", "method_type"}
_ATTRS = {}


def attributes(kind):
    if kind not in _ATTRS:
        _ATTRS[kind] = sorted({name for base in kind.__mro__ for name in getattr(base, "__mypyc_attrs__", ())} - SKIPPED - {"__dict__"})
    return _ATTRS[kind]


class Finder:
    """Mypy's own visitors are compiled and cannot be subclassed: this walks over attributes."""

    def walk(self, node):
        if id(node) in self.seen:
            return
        self.seen.add(id(node))
        method = getattr(self, "on_" + type(node).__name__, None)
        if method is not None:
            method(node)
        else:
            self.inner(node)

    def inner(self, node):
        for name in attributes(type(node)):
            try:
                value = getattr(node, name)
            except AttributeError:
                continue
            self.values(value)

    def values(self, value):
        if isinstance(value, (TypeInfo, Var)):
            return
        if isinstance(value, Node):
            self.walk(value)
        elif isinstance(value, (list, tuple)):
            for one in value:
                self.values(one)

    def __init__(self, types, attrs, params, path):
        self.seen = set()
        self.types, self.attrs, self.params, self.path = types, attrs, params, path
        self.source = path.read_bytes()
        self.lines = self.source.splitlines(keepends=True)
        tree = ast.parse(self.source)
        self.calls = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self.calls[node.lineno, node.col_offset, node.end_lineno, node.end_col_offset] = node
        self.edits, self.problems, self.variables = [], [], {}
        self.unknown = {}

    # -- keys ------------------------------------------------------------------------------------

    def of_class(self, info, name):
        """The new name of an attribute of a class, by the first class above that has a row."""
        for base in info.mro:
            new = self.attrs.get((base.module_name, f"{base.fullname[len(base.module_name) + 1:]}.{name}"))
            if new is not None:
                return new
        return None

    def classes(self, type_):
        type_ = get_proper_type(type_)
        match type_:
            case Instance():
                return [type_.type]
            case UnionType():
                return [info for item in type_.items for info in self.classes(item)]
            case TupleType():
                return self.classes(type_.partial_fallback)
            case TypeVarType():
                return self.classes(type_.upper_bound)
            case TypeType():
                return self.classes(type_.item)
            case CallableType() if type_.is_type_obj():
                return self.classes(type_.ret_type)
            case Overloaded() if type_.is_type_obj():
                return self.classes(type_.items[0].ret_type)
        return []

    def add(self, line, column, old, new):
        self.edits.append((line, column, old, new))

    # -- uses ------------------------------------------------------------------------------------

    def on_MemberExpr(self, o: MemberExpr) -> None:
        self.inner(o)
        if o.name in self.interesting:
            base = o.expr
            kinds = []
            if isinstance(base, RefExpr) and isinstance(base.node, TypeInfo):
                kinds = [base.node]
            elif base in self.types:
                kinds = self.classes(self.types[base])
            if not kinds and isinstance(base, NameExpr) and base.name == "self" and self.current is not None:
                kinds = [self.current]  # in code that mypy takes to be unreachable
            news = {self.of_class(info, o.name) for info in kinds}
            hits = news - {None}
            if len(hits) == 1:
                new = hits.pop()
                if None in news:
                    self.problems.append(f"{self.path}:{o.line}: .{o.name} of several classes, one renamed to {new}")
                self.add(o.end_line, o.end_column - len(o.name.encode()), o.name, new)
            elif len(hits) > 1:
                self.problems.append(f"{self.path}:{o.line}: .{o.name} has two new names {hits}")
            elif not kinds and not (isinstance(base, RefExpr) and base.fullname and base.node is not None and not isinstance(base.node, Var)):
                self.unknown[o.line, o.end_column] = o.name
                if o.name in self.sure:
                    self.add(o.end_line, o.end_column - len(o.name.encode()), o.name, self.sure[o.name])

    def on_NameExpr(self, o: NameExpr) -> None:
        node = o.node
        if isinstance(node, Var) and id(node) in self.variables:
            self.add(o.line, o.column, o.name, self.variables[id(node)])
        elif isinstance(node, (Var, FuncDef, Decorator, OverloadedFuncDef)) and o.name in self.interesting:
            info = node.info if not isinstance(node, Decorator) else node.func.info
            info = real(info)
            if info is not None and o.name in info.names:
                new = self.of_class(info, o.name)
                if new is not None:
                    self.add(o.line, o.column, o.name, new)
        self.inner(o)

    current = None

    def on_ClassDef(self, o: ClassDef) -> None:
        before, self.current = self.current, o.info
        self.inner(o)
        self.current = before

    def on_FuncDef(self, o: FuncDef) -> None:
        info = real(o.info)
        if info is not None and o.name in self.interesting and o.name in info.names:
            new = self.of_class(info, o.name)
            if new is not None:
                import re
                start = sum(map(len, self.lines[:o.line - 1])) + o.column
                found = re.compile(rb"(?:async\s+)?def\s+").search(self.source, start)
                before = self.source[:found.end()]
                self.add(before.count(b"\n") + 1, found.end() - (before.rfind(b"\n") + 1), o.name, new)
        key = self.key_of(o)
        if key is not None:
            mine = self.by_function.get(key)
            if mine:
                for argument in o.arguments:
                    new = mine.get(argument.variable.name)
                    if new is not None:
                        self.add(argument.line, argument.column, argument.variable.name, new)
                        self.variables[id(argument.variable)] = new
        self.inner(o)

    def key_of(self, func):
        full = func.fullname or ""
        for module, dotted in self.by_function:
            if full == f"{module}.{dotted}":
                return module, dotted
        return None

    def on_CallExpr(self, o: CallExpr) -> None:
        self.inner(o)
        named = [name for kind, name in zip(o.arg_kinds, o.arg_names) if kind == ARG_NAMED and name in self.keywords]
        if named:
            self.keyword_arguments(o, named)
        callee = o.callee
        if isinstance(callee, RefExpr) and callee.name in ("setattr", "getattr", "hasattr", "delattr", "object") and len(o.args) > 1:
            item = o.args[1]
            if isinstance(item, StrExpr) and item.value in self.interesting:
                base = o.args[0]
                kinds = [base.node] if isinstance(base, RefExpr) and isinstance(base.node, TypeInfo) else (
                    self.classes(self.types[base]) if base in self.types else [])
                news = {self.of_class(info, item.value) for info in kinds} - {None}
                if len(news) == 1:
                    self.add(item.line, item.column + 1, item.value, news.pop())
                elif not kinds:
                    self.unknown[item.line, item.column] = item.value

    def keyword_arguments(self, o, named):
        node = self.calls.get((o.line, o.column, o.end_line, o.end_column))
        if node is None:
            self.problems.append(f"{self.path}:{o.line}: call not found for keywords {named}")
            return
        kinds, functions = [], []
        callee = o.callee
        if isinstance(callee, RefExpr) and isinstance(callee.node, TypeInfo):
            kinds = [callee.node]
        type_ = get_proper_type(self.types.get(callee)) if callee in self.types else None
        each = type_.items if isinstance(type_, Overloaded) else [type_] if isinstance(type_, CallableType) else []
        for one in each:
            if one.is_type_obj():
                kinds += self.classes(one.ret_type)
            if one.definition is not None:
                functions.append(one.definition)
        if isinstance(callee, RefExpr):
            if callee.fullname in ("dataclasses.replace", "copy.replace") and o.args and o.args[0] in self.types:
                kinds += self.classes(self.types[o.args[0]])
            if callee.name == "_replace" and isinstance(callee, MemberExpr) and callee.expr in self.types:
                kinds += self.classes(self.types[callee.expr])
            if isinstance(callee.node, (FuncDef, Decorator, OverloadedFuncDef)):
                functions.append(callee.node)
        for keyword in node.keywords:
            if keyword.arg not in named:
                continue
            news = {self.of_class(info, keyword.arg) for info in kinds} - {None}
            for function in functions:
                items = function.items if isinstance(function, OverloadedFuncDef) else [function]
                for item in items:
                    full = getattr(item, "fullname", "") or ""
                    for (module, dotted), mine in self.by_function.items():
                        if full == f"{module}.{dotted}" and keyword.arg in mine:
                            news.add(mine[keyword.arg])
            for info in kinds:
                for (module, dotted), mine in self.by_function.items():
                    if keyword.arg in mine and dotted.endswith(".__init__") and any(
                            base.fullname == f"{module}.{dotted.removesuffix('.__init__')}" for base in info.mro):
                        news.add(mine[keyword.arg])
            if len(news) == 1:
                self.add(keyword.lineno, keyword.col_offset, keyword.arg, news.pop())
            elif not kinds and not functions:
                self.unknown[keyword.lineno, keyword.col_offset] = f"{keyword.arg}="

    def on_ClassPattern(self, o: ClassPattern) -> None:
        self.inner(o)
        if isinstance(o.class_ref, RefExpr) and isinstance(o.class_ref.node, TypeInfo):
            for key in o.keyword_keys:
                if self.of_class(o.class_ref.node, key):
                    self.problems.append(f"{self.path}:{o.line}: {key} in a class pattern: by hand")


def find(root, table, index):
    began = time.time()
    attrs = {(index.standing(module), dotted): new for (module, dotted), new in table.attrs.items()}
    # a class that has been renamed already, or is renamed in this run, is found under both names
    for (module, dotted), new in list(attrs.items()):
        klass, _, rest = dotted.partition(".")
        later = {n: w for (m, n), w in table.all_names.items() if index.standing(m) == module}.get(klass)
        if later:
            attrs[module, f"{later}.{rest}"] = new
    params = {}
    for (module, dotted), new in table.params.items():
        module = index.standing(module)
        function, _, name = dotted.rpartition(".")
        first = function.partition(".")
        later = {n: w for (m, n), w in table.all_names.items() if index.standing(m) == module}.get(first[0])
        for one in {function, f"{later}{first[1]}{first[2]}" if later else function}:
            params.setdefault((module, one), {})[name] = new
    options = Options()
    options.export_types = options.preserve_asts = True
    options.check_untyped_defs = True
    options.incremental = False
    options.fine_grained_incremental = False
    options.show_traceback = True
    options.ignore_missing_imports = True
    options.namespace_packages = True
    options.explicit_package_bases = True
    options.python_version = (3, 11)
    options.mypy_path = [str(root / "src"), str(root)] + [
        str(path) for path in [root / "tests", *sorted((root / "tests").iterdir())] if path.is_dir()
    ]
    options.per_module_options = {
        name: {"follow_imports": "skip", "ignore_missing_imports": True}
        for top in ("transformers triton vllm ray scipy matplotlib hypothesis selenium openai schemathesis sympy torch numpy "
                    "tokenizers safetensors typer rich click fastapi starlette pydantic uvicorn prometheus_client "
                    "llguidance jinja2 jsonschema_rs pytest _pytest soundfile gguf accelerate requests httpx jiwer datasets pandas "
                    "huggingface_hub multipart httptools rouge_score sacrebleu llm").split()
        for name in (top, f"{top}.*")
    }
    options.build_per_module_cache()
    words = {dotted.rpartition(".")[2] for _, dotted in [*attrs, *table.params]}
    pattern = re.compile(r"\b(?:" + "|".join(map(re.escape, sorted(words))) + r")\b")
    listed = [(path, name) for path, name in sources(root)
              if name.split(".")[0] == "outrider" or pattern.search(path.read_text("utf-8"))]
    given = [BuildSource(str(path), name, None) for path, name in listed]
    import os
    before = os.getcwd()
    os.chdir(root)
    try:
        result = mypy_build.build(given, options)
    except Exception as error:
        for line in getattr(error, "messages", [])[:10]:
            print("mypy:", line)
        raise
    finally:
        os.chdir(before)
    Finder.interesting = {dotted.rpartition(".")[2] for _, dotted in attrs}
    Finder.by_function = params
    Finder.keywords = Finder.interesting | {name for mine in params.values() for name in mine}
    everywhere = {}
    for module, tree in result.files.items():
        if module.split(".")[0] == "outrider":
            for info in classes_of(tree):
                for name in info.names:
                    everywhere.setdefault(name, set()).add((info.module_name, info.fullname[len(info.module_name) + 1:] + "." + name))
    # an attribute of an object of unknown type is renamed if only classes of the table have it
    Finder.sure = {}
    for name in Finder.interesting:
        news = {attrs.get(key) for key in everywhere.get(name, ())}
        if len(news) == 1 and None not in news and len(name) > 3:
            Finder.sure[name] = news.pop()
    found, unknown = {}, []
    for path, module in listed:
        tree = result.files.get(module)
        if tree is None:
            continue
        finder = Finder(result.types, attrs, params, path)
        finder.values(tree.defs)
        if finder.edits:
            found[str(path.relative_to(root))] = sorted(set(finder.edits))
        for line in finder.problems:
            print("problem:", line)
        unknown += [f"{path.relative_to(root)}:{line[0]}: {name}" for line, name in finder.unknown.items() if name not in Finder.sure]
    if unknown:
        print(f"{len(unknown)} uses of renamed words on objects of unknown type are left alone (unknown.txt)")
        Path(__file__).with_name("unknown.txt").write_text("\n".join(unknown))
    print(f"types: {time.time() - began:.0f} s, {sum(map(len, found.values()))} edits in {len(found)} files")
    return found


def classes_of(tree):
    stack = [node.node for node in tree.names.values() if isinstance(node.node, TypeInfo) and node.node.module_name == tree.fullname]
    while stack:
        info = stack.pop()
        yield info
        stack += [inner.node for inner in info.names.values() if isinstance(inner.node, TypeInfo)]
