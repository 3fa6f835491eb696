"""Renames modules, names, attributes, parameters and folders over the repository, in place.

    python rename.py --root TREE --room server [--check]

The table (table.tsv, beside this file) has tab-separated lines: room, kind, old, new.
    module  outrider.server.engine_process          outrider.server.engine_process   (packages too)
    name    outrider.server.engine_process:AddRequest    AddRequest        class, function or constant of a module
    attr    outrider.server.engine_loop:EngineLoop.go   start             field, method, property (resolved by mypy)
    param   outrider.load:load.packed      pack_weights      keyword of a function or method (mypy)
    path    tests/exactness                      tests/exactness   any other file or folder
    text    docs/*.md|README.md            regex => text     what no resolver can see
Names are resolved by the module that defines them, through imports, re-exports and scopes; what is
already renamed is left alone, so a run on a tree that is done changes nothing.
"""

import argparse
import ast
import fnmatch
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLACES = ["src", "tests", "benchmarks", "examples", "training", "tools", "docs"]
TOP = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "pyproject.toml", "Makefile",
       "mkdocs.yml", ".pre-commit-config.yaml", ".ci/run"]
UNTOUCHED = ["docs/log.md", "docs/results/*", "docs/log/*", "CHANGELOG.md", "src/outrider/pair/*", "docs/report.html", "benchmarks/results/*"]
TEXTS = {".py", ".md", ".toml", ".yml", ".yaml", ".cfg", ".ini", ".txt", ".html", ".ipynb", ".tmpl", ".j2", ".sh", ".c", ".h", ""}


def sh(root, *words):
    return subprocess.run(words, cwd=root, check=True, capture_output=True, text=True).stdout


class Table:
    def __init__(self, path, room):
        self.modules, self.names, self.attrs, self.params = {}, {}, {}, {}
        self.paths, self.texts, self.all_modules, self.all_names = {}, [], {}, {}
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            parts = line.split("\t")
            parts = [p.strip() for p in parts if p.strip()]
            if len(parts) < 4:
                sys.exit(f"table line {number}: {line!r}")
            where, kind, old, new = parts[:4]
            mine = room in ("all", where)
            if kind == "module":
                self.all_modules[old] = new
                if mine:
                    self.modules[old] = new
            elif kind == "name":
                self.all_names[tuple(old.split(":"))] = new
                if mine:
                    self.names[tuple(old.split(":"))] = new
            elif kind in ("attr", "param") and mine:
                module, dotted = old.split(":")
                (self.attrs if kind == "attr" else self.params)[module, dotted] = new
            elif kind == "path" and mine:
                self.paths[old] = new
            elif kind == "text" and mine:
                pattern, _, after = new.partition(" => ")
                pattern, _, without = pattern.partition(" ~~ ")  # lines with this stay
                self.texts.append((old.split("|"), re.compile(pattern, re.M), after.replace("␠", " "),
                                   re.compile(without) if without else None))


def longest(table, module):
    """`module` under a table of prefixes."""
    parts = module.split(".")
    for size in range(len(parts), 0, -1):
        new = table.get(".".join(parts[:size]))
        if new is not None:
            return ".".join([new, *parts[size:]])
    return module


class Index:
    """What every module of src defines and imports."""

    def __init__(self, root, table):
        self.root, self.table = root, table
        self.files = {}
        for path in sorted((root / "src").rglob("*.py")):
            parts = list(path.relative_to(root / "src").with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            self.files[".".join(parts)] = path
        self.bindings = {}
        for module, path in self.files.items():
            scope = Scope(None, "module")
            collect(ast.parse(path.read_bytes()).body, scope)
            self.bindings[module] = scope.names
        self.back = {longest(table.all_modules, old): old for old in table.all_modules}
        self.names = {}
        for (module, name), new in table.names.items():
            self.names[self.standing(module), name] = new
        for (module, name), new in self.names.items():
            if module not in self.files:
                print(f"warning: no module {module} (for {name})")
            elif name not in self.bindings[module] and new not in self.bindings[module]:
                print(f"warning: {module} defines neither {name} nor {new}")

    def standing(self, module):
        """Where a module of the table is now: under its old or its new path."""
        if module in self.files:
            return module
        new = longest(self.table.all_modules, module)
        return new if new in self.files else module

    def resolve(self, module, name, depth=0):
        """("sym", module, name), ("mod", module) or None."""
        module = self.standing(module)
        if depth > 12:
            return None
        if (module, name) in self.names and name not in self.bindings.get(module, ()):
            return ("sym", module, name)  # used under its old name, defined under its new one
        if module in self.files:
            bound = self.bindings[module].get(name, 0)
            if bound != 0:
                if bound is None or bound[0] == "def":
                    return ("sym", module, name)
                if bound[0] == "import" and bound[1:] != (module, name):
                    return self.resolve(bound[1], bound[2], depth + 1)
                if bound[0] == "mod":
                    return ("mod", bound[1]) if bound[1].split(".")[0] == "outrider" else None
        inner = self.standing(f"{module}.{name}")
        return ("mod", inner) if inner in self.files else None

    def new_name(self, origin, local):
        """What a name bound to `origin` under its own name is called afterwards."""
        if origin is None:
            return local
        if origin[0] == "sym":
            return self.names.get(origin[1:], local) if origin[2] == local else local
        if origin[0] == "mod":
            old = origin[1].split(".")[-1]
            return longest(self.table.modules, origin[1]).split(".")[-1] if old == local else local
        return local


class Scope:
    def __init__(self, parent, kind):
        self.parent, self.kind, self.names, self.globals = parent, kind, {}, set()


def bind(scope, name, origin=None, weak=True):
    if name in scope.globals:
        return
    if origin is None and name in scope.names:
        return
    if scope.names.get(name) is not None and origin is not None and origin[0] == "def":
        return
    scope.names[name] = origin


def collect(nodes, scope):
    """Names that statements bind in their own scope."""
    default = ("def",) if scope.kind == "module" else None

    def go(node):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bind(scope, node.name, default)
                for inner in node.decorator_list:
                    go(inner)
                return
            case ast.Lambda():
                return
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                for inner in ast.walk(node):
                    if isinstance(inner, ast.NamedExpr):
                        bind(scope, inner.target.id, default)
                return
            case ast.AnnAssign(value=None) if scope.kind == "class":
                return  # a field without a value binds nothing
            case ast.Import():
                for alias in node.names:
                    if alias.asname:
                        bind(scope, alias.asname, ("mod", alias.name))
                    else:
                        first = alias.name.split(".")[0]
                        bind(scope, first, ("mod", first))
            case ast.ImportFrom():
                for alias in node.names:
                    bind(scope, alias.asname or alias.name, ("import", node.module or "", alias.name))
            case ast.Name(ctx=ast.Store() | ast.Del()):
                bind(scope, node.id, default)
            case ast.ExceptHandler() if node.name:
                bind(scope, node.name, default)
            case ast.MatchAs() | ast.MatchStar() if node.name:
                bind(scope, node.name, default)
            case ast.MatchMapping() if node.rest:
                bind(scope, node.rest, default)
            case ast.Global() | ast.Nonlocal():
                scope.globals.update(node.names)
                for name in node.names:
                    scope.names.pop(name, None)
        for child in ast.iter_child_nodes(node):
            go(child)

    for node in nodes:
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            scope.globals.update(node.names)
    for node in nodes:
        go(node)


class File:
    """Edits of one Python source text."""

    def __init__(self, index, text, module=None, label="", scope=None):
        self.index, self.table, self.label = index, index.table, label
        self.module = module
        self.source = text.encode()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.edits = {}
        self.problems = []
        self.tree = ast.parse(self.source)
        self.scope = scope or Scope(None, "module")
        collect(self.tree.body, self.scope)
        self.fstring = None

    def at(self, line, col):
        return self.starts[line - 1] + col

    def span(self, node):
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def edit(self, start, end, new):
        self.edits[start, end] = new

    def swap(self, start, old, new):
        """Replace a word at an offset; in f-strings Python 3.11 may give a wrong one."""
        size = len(old.encode())
        if self.source[start:start + size] == old.encode():
            self.edit(start, start + size, new)
            return
        spans = [self.fstring] if self.fstring else self.joined(start)
        if not spans:
            self.problems.append(f"{self.label}: {old} is not where it should be, offset {start}")
            return
        for low, high in spans:
            for found in re.finditer(rb"(?<![\w])" + old.encode() + rb"(?!\w)", self.source[low:high]):
                place = low + found.start(), low + found.end()
                inside = self.source[low:low + found.start()]
                if place not in self.edits and inside.count(b"{") > inside.count(b"}"):
                    self.edit(*place, new)
                    return
        self.problems.append(f"{self.label}: {old} not found in an f-string")

    def joined(self, place):
        """f-strings around an offset, the nearest first."""
        spans = [self.span(node) for node in ast.walk(self.tree) if isinstance(node, ast.JoinedStr)]
        line = self.source[:place].count(b"\n")
        near = [(low, high) for low, high in spans
                if self.source[:low].count(b"\n") - 1 <= line <= self.source[:high].count(b"\n") + 1]
        return sorted(near, key=lambda span: (not span[0] <= place <= span[1], abs(span[0] - place)))

    # -- names -----------------------------------------------------------------------------------

    def origin(self, bound):
        if bound is None:
            return None
        if bound[0] == "def":
            return None
        if bound[0] == "import":
            return self.index.resolve(bound[1], bound[2])
        return ("mod", self.index.standing(bound[1])) if bound[1].split(".")[0] == "outrider" else None

    def lookup(self, name, scope):
        """(origin, scopes up to the one that binds it)."""
        passed, first = [], True
        while scope is not None:
            if scope.kind != "class" or first:
                passed.append(scope)
                if name in scope.names:
                    bound = scope.names[name]
                    if bound == ("def",):
                        if self.module is not None:
                            return self.index.resolve(self.module, name), passed
                        return None, passed
                    return self.origin(bound), passed
            first = False
            scope = scope.parent
        return None, passed

    def rename(self, name, scope, line):
        origin, passed = self.lookup(name, scope)
        new = self.index.new_name(origin, name)
        if new != name:
            for inner in passed:
                if new in inner.names:
                    other, _ = self.lookup(new, inner)
                    if other == origin:
                        continue
                    if self.index.new_name(other, new) != new:
                        continue  # it moves away in this very run
                    self.problems.append(f"{self.label}:{line}: {name} -> {new}, which is bound there already")
        return new

    def module_of(self, node, scope):
        """The module that an expression is, or None."""
        if isinstance(node, ast.Name):
            origin, _ = self.lookup(node.id, scope)
        elif isinstance(node, ast.Attribute):
            base = self.module_of(node.value, scope)
            if base is None:
                return None
            origin = self.index.resolve(base, node.attr)
        else:
            return None
        return origin[1] if origin is not None and origin[0] == "mod" else None

    # -- the walk --------------------------------------------------------------------------------

    def run(self):
        for node in self.tree.body:
            self.visit(node, self.scope)
        self.tokens()
        return self

    def result(self):
        out, last = [], 0
        spans = sorted(self.edits)
        for (start, end) in spans:
            if start < last:
                self.problems.append(f"{self.label}: two edits overlap at {start}: {self.source[start:end]!r}")
                continue
            out += [self.source[last:start], self.edits[start, end].encode()]
            last = end
        out.append(self.source[last:])
        return b"".join(out).decode()

    def visit(self, node, scope):
        kind = type(node).__name__
        method = getattr(self, f"on_{kind}", None)
        if method is not None:
            method(node, scope)
        else:
            self.children(node, scope)

    def children(self, node, scope):
        for child in ast.iter_child_nodes(node):
            self.visit(child, scope)

    def on_JoinedStr(self, node, scope):
        before = self.fstring
        if before is None:
            self.fstring = self.span(node)
        self.children(node, scope)
        self.fstring = before

    def on_Name(self, node, scope):
        new = self.rename(node.id, scope, node.lineno)
        if new != node.id:
            self.swap(self.at(node.lineno, node.col_offset), node.id, new)

    def on_Attribute(self, node, scope):
        base = self.module_of(node.value, scope)
        if base is not None:
            origin = self.index.resolve(base, node.attr)
            new = self.index.new_name(origin, node.attr)
            if origin is not None and origin[0] == "sym" and origin[2] != node.attr:
                new = node.attr
            if new != node.attr:
                self.swap(self.span(node)[1] - len(node.attr.encode()), node.attr, new)
            # a submodule that moves to another package: outrider.speech -> outrider.speech
            if origin is not None and origin[0] == "mod":
                moved = longest(self.table.modules, origin[1])
                parent = longest(self.table.modules, origin[1].rpartition(".")[0])
                if moved.rpartition(".")[0] != parent:
                    self.problems.append(f"{self.label}:{node.lineno}: {ast.unparse(node)} moves to {moved}")
        self.visit(node.value, scope)

    def header(self, node):
        start = self.span(node)[0]
        found = re.compile(rb"(?:async\s+)?(?:def|class)\s+").match(self.source, start)
        return found.end()

    def named(self, node, scope):
        new = self.rename(node.name, scope, node.lineno) if scope.kind == "module" else node.name
        if new != node.name:
            self.swap(self.header(node), node.name, new)

    def on_ClassDef(self, node, scope):
        self.named(node, scope)
        for part in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(part, scope)
        inner = Scope(scope, "class")
        collect(node.body, inner)
        for part in node.body:
            self.visit(part, inner)

    def on_FunctionDef(self, node, scope):
        self.named(node, scope)
        for part in node.decorator_list:
            self.visit(part, scope)
        self.function(node, scope, node.body)

    on_AsyncFunctionDef = on_FunctionDef

    def on_Lambda(self, node, scope):
        self.function(node, scope, [node.body])

    def function(self, node, scope, body):
        arguments = node.args
        each = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        each += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
        for one in each:
            if one.annotation is not None:
                self.annotation(one.annotation, scope)
        if getattr(node, "returns", None) is not None:
            self.annotation(node.returns, scope)
        for default in [*arguments.defaults, *arguments.kw_defaults]:
            if default is not None:
                self.visit(default, scope)
        inner = Scope(scope, "function")
        collect(body, inner)
        for one in each:
            inner.names[one.arg] = None
        for part in body:
            self.visit(part, inner)

    def on_AnnAssign(self, node, scope):
        self.annotation(node.annotation, scope)
        if scope.kind != "class" or node.value is not None:
            self.visit(node.target, scope)
        if node.value is not None and "TypeAlias" in ast.unparse(node.annotation):
            self.annotation(node.value, scope)
        elif node.value is not None:
            self.visit(node.value, scope)

    def annotation(self, node, scope):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                start, end = self.span(inner)
                raw = self.source[start:end].decode()
                new = self.words(f" {raw[1:-1]}", scope, inner.lineno)[1:]
                if new != raw[1:-1]:
                    self.edit(start, end, f"{raw[0]}{new}{raw[-1]}")
        self.visit(node, scope)

    def words(self, raw, scope, line, skip_keywords=False):
        """Source text in a string: names that resolve are renamed."""
        def one(found):
            word, rest = found[1], found[2]
            origin, _ = self.lookup(word, scope)
            new = self.rename(word, scope, line)
            return chained(self.index, origin, new, rest) if rest else new
        after = r"(?!\s*=[^=])" if skip_keywords else ""
        return re.sub(rf"(?<![\w.\"'/-])([A-Za-z_]\w*)\b{after}((?:\.[A-Za-z_]\w*)*)", one, raw)

    def comprehension(self, node, scope):
        inner = Scope(scope, "function")
        for part in node.generators:
            collect([part.target], inner)
        self.children(node, inner)

    on_ListComp = on_SetComp = on_DictComp = on_GeneratorExp = comprehension

    def on_Import(self, node, scope):
        parts = []
        for alias in node.names:
            name = alias.name
            if name.split(".")[0] == "outrider":
                name = longest(self.table.modules, self.index.standing(name))
            parts.append(f"{name} as {alias.asname}" if alias.asname else name)
        new = "import " + ", ".join(parts)
        start, end = self.span(node)
        if new != ast.unparse(node):
            self.edit(start, end, new)

    def on_ImportFrom(self, node, scope):
        if (node.module or "").split(".")[0] != "outrider":
            return
        base = self.index.standing(node.module)
        groups = defaultdict(list)
        changed = base != node.module
        for alias in node.names:
            origin = self.index.resolve(base, alias.name)
            name, home = alias.name, longest(self.table.modules, base)
            if origin is not None and origin[0] == "mod" and origin[1] == f"{base}.{alias.name}":
                moved = longest(self.table.modules, origin[1])
                home, _, name = moved.rpartition(".")
            elif origin is not None and origin[0] == "mod":
                name = self.index.new_name(origin, alias.name)
                if alias.name in self.index.bindings.get(base, {}) and origin[1].startswith(f"{base}."):
                    moved = longest(self.table.modules, origin[1])
                    home, _, name = moved.rpartition(".")
            elif origin is not None:
                name = self.index.new_name(origin, alias.name)
            if alias.asname is None and name != alias.name:
                self.rename(alias.name, scope, node.lineno)
            keep = alias.asname
            groups[home].append(f"{name} as {keep}" if keep and keep != name else
                                (f"{name} as {name}" if keep and keep == alias.name and name == keep else name))
            if keep and keep == alias.name and name != keep:  # a re-export: X as X
                groups[home][-1] = f"{name} as {name}"
            changed |= home != node.module or name != alias.name
        if not changed:
            return
        start, end = self.span(node)
        if b"#" in self.source[start:end]:
            self.problems.append(f"{self.label}:{node.lineno}: a comment inside an import is lost")
        indent = " " * node.col_offset
        lines = [f"from {home} import {', '.join(names)}" if len(home) + sum(map(len, names)) < 70 else
                 f"from {home} import (\n{indent}    " + f",\n{indent}    ".join(names) + f",\n{indent})"
                 for home, names in groups.items()]
        self.edit(start, end, f"\n{indent}".join(lines))

    def on_Global(self, node, scope):
        start, end = self.span(node)
        raw = self.source[start:end].decode()
        new = "global " + ", ".join(self.rename(name, scope, node.lineno) for name in node.names)
        if new != raw:
            self.edit(start, end, new)

    def on_Assign(self, node, scope):
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            for item in ast.walk(node.value):
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    new = self.rename(item.value, scope, item.lineno)
                    if new != item.value:
                        start, end = self.span(item)
                        self.edit(start, end, f'"{new}"')
            return
        self.children(node, scope)

    def on_Call(self, node, scope):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("setattr", "getattr", "hasattr", "delattr", "object") and len(node.args) > 1:
            base, item = node.args[0], node.args[1]
            module = self.module_of(base, scope)
            if module is None and isinstance(base, ast.Subscript) and isinstance(base.slice, ast.Constant):
                module = self.index.standing(str(base.slice.value))
            if module is not None and isinstance(item, ast.Constant) and isinstance(item.value, str):
                origin = self.index.resolve(module, item.value)
                new = self.index.new_name(origin, item.value)
                if new != item.value:
                    start, end = self.span(item)
                    self.edit(start, end, f'"{new}"')
        if name == "cast" and node.args and isinstance(node.args[0], ast.Constant):
            self.annotation(node.args[0], scope)
        self.children(node, scope)

    def on_Dict(self, node, scope):
        """Tables of lazy exports: {"Name": "outrider.module"}."""
        for key, value in zip(node.keys, node.values):
            both = isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
            if both and isinstance(key.value, str) and str(value.value).startswith("outrider."):
                module = self.index.standing(value.value)
                if module in self.index.files:
                    new = self.index.new_name(self.index.resolve(module, key.value), key.value)
                    if new != key.value:
                        self.edit(*self.span(key), f'"{new}"')
        self.children(node, scope)

    # -- strings and comments --------------------------------------------------------------------

    def tokens(self):
        docs = set()
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0] if node.body else None
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                    docs.add(self.span(first.value)[0])
        taken = sorted(self.edits)
        for token in tokenize.generate_tokens(io.StringIO(self.source.decode()).readline):
            if token.type not in (tokenize.COMMENT, tokenize.STRING):
                continue
            lines = self.source.splitlines(keepends=True)[token.start[0] - 1:token.start[0]]
            column = len(lines[0].decode()[:token.start[1]].encode()) if lines else 0
            start = self.at(token.start[0], column)
            end = start + len(token.string.encode())
            raw = token.string
            inside = [(s, e) for s, e in taken if start <= s and e <= end]
            if inside and token.type == tokenize.STRING and re.match(r"[rR]?[fF]", raw) is None:
                continue
            new = prose(raw, self, prose_names=token.type == tokenize.COMMENT or start in docs)
            if start in docs:
                new = self.doctests(new, token.start[0])
            if new == raw:
                continue
            if inside:  # an f-string with edits in it: apply both piece by piece
                self.problems.append(f"{self.label}:{token.start[0]}: text and names in one f-string; by hand: {raw[:60]!r}")
                continue
            self.edit(start, end, new)

    def doctests(self, text, line):
        if ">>>" not in text:
            return text
        scope = Scope(self.scope, "function")
        code = "\n".join(m[1] for m in re.finditer(r"^\s*(?:>>>|\.\.\.) ?(.*)$", text, re.M))
        for statement in re.findall(r"^\s*((?:from outrider[\w.]* )?import .*)$", code, re.M):
            try:
                collect(ast.parse(statement.split("#")[0].strip()).body, scope)
            except SyntaxError:
                continue
        for name in re.findall(r"^([a-z_]\w*)(?:\s*,\s*\w+)* = ", code, re.M):
            if name not in scope.names:
                scope.names[name] = None

        out, shown = [], False
        for row in text.split("\n"):
            found = re.match(r"(\s*(?:>>>|\.\.\.) ?)(.*)$", row)
            if found:
                row = found[1] + self.words(found[2], scope, line, skip_keywords=True)
            elif shown and row.strip():  # what is printed: Name(field=1)
                row = re.sub(r"(?<![\w.])([A-Z]\w*)(?=\()", lambda m: self.rename(m[1], scope, line), row)
            shown = bool(found) or (shown and bool(row.strip()))
            out.append(row)
        return "\n".join(out)


DOTTED = re.compile(r"\boutrider(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(r"[\w.\-]*(?:/[\w.\-]+)+/?|\b[a-z_]\w*/(?![\w*])")
SPAN = re.compile(r"`([A-Za-z_]\w*)((?:\.[A-Za-z_]\w*)*)([^`\n]*)`")


def dotted(index, text):
    """A dotted outrider name after the renames."""
    parts = text.split(".")
    if index.standing(text) in index.files:
        return longest(index.table.modules, index.standing(text))
    for size in range(len(parts) - 1, 0, -1):
        base = index.standing(".".join(parts[:size]))
        if base in index.files:
            origin = index.resolve(base, parts[size])
            home = longest(index.table.modules, base)
            new = index.new_name(origin, parts[size])
            if origin is not None and origin[0] == "mod" and origin[1] != f"{base}.{parts[size]}":
                return ".".join([home, new, *parts[size + 1:]])
            return ".".join([home, new, *parts[size + 1:]])
    return text


def prose(text, where, prose_names=True):
    """Dotted names, file paths, and (in comments and pages) code spans."""
    index = where.index
    if "outrider." in text:
        text = re.sub(r"\b(outrider(?:\.\w+)+):([A-Za-z_]\w*)", lambda m: attribute(index, m), text)
        text = DOTTED.sub(lambda m: dotted(index, m[0]), text)
        text = re.sub(r"(from )(outrider[\w.]*)( import )([\w, ]+)", lambda m: m[0] if ">>>" in text else imported(index, m), text)
    if "/" in text:
        text = PATH.sub(lambda m: index.moved(m[0]), text)
    if prose_names and "`" in text:
        text = SPAN.sub(lambda m: spanned(where, m), text)
    return text


def attribute(index, m):
    """`outrider.module:name`, as entry points and registries write it."""
    module = index.standing(m[1])
    if module not in index.files:
        return m[0]
    new = index.new_name(index.resolve(module, m[2]), m[2])
    return f"{longest(index.table.modules, module)}:{new}"


def imported(index, m):
    """`from outrider.new import Old` in a text whose module has been renamed already."""
    return m[0]


def spanned(where, m):
    head, rest, tail = m[1], m[2], m[3]
    if tail and not re.match(r"[(\[=, :/{]|\(", tail):
        return m[0]
    new = where.span_name(head, rest)
    return f"`{new}{tail}`" if new is not None else m[0]


def _file_span(self, head, rest):
    origin, _ = self.lookup(head, self.scope)
    if origin is None and head not in self.scope.names and head.lstrip("_")[:1].isupper():
        if head in self.index.bindings["outrider"]:  # a public name
            candidates = {self.index.resolve("outrider", head)} - {None}
        else:
            candidates = {("sym", module, name) for module, name in self.index.unique.get(head, ())}
        if len(candidates) == 1:
            origin = candidates.pop()
    if origin is None and self.module is None:
        return None
    if origin is None:
        module = None
        package = (self.module or "").split(".")
        for size in range(len(package), 0, -1):  # `shaping` or `laws.shaping`, from a module beside it
            candidate = self.index.standing(".".join([*package[:size], head]))
            if candidate in self.index.files and candidate != self.module:
                module = candidate
                break
        if module is None or not rest or f"{head}{rest}" in METHODS:
            return None
        origin = ("mod", module)
    new = self.index.new_name(origin, head)
    return chained(self.index, origin, new, rest)


def chained(index, origin, new, rest):
    out = [new]
    for part in rest.split(".")[1:]:
        if origin is not None and origin[0] == "mod":
            origin = index.resolve(origin[1], part)
            out.append(index.new_name(origin, part))
        else:
            origin = None
            out.append(part)
    return ".".join(out)


File.span_name = _file_span


class Page:
    """A page of documentation: fenced Python is resolved as code, spans by names that are unique."""

    def __init__(self, index, text, label):
        self.index, self.text, self.label, self.problems = index, text, label, []

    def run(self):
        scope = Scope(None, "module")
        fences = list(re.finditer(r"^( *)```(?:python|py)\n(.*?)^\1```", self.text, re.M | re.S))
        for fence in fences:
            try:
                collect(ast.parse(undent(fence[2], fence[1])).body, scope)
            except SyntaxError:
                pass
        for name, bound in list(scope.names.items()):
            if bound == ("def",):
                scope.names[name] = None
        out, last = [], 0
        for fence in fences:
            out.append(self.plain(self.text[last:fence.start(2)], scope))
            code = undent(fence[2], fence[1])
            try:
                inner = Scope(None, "module")
                inner.names = dict(scope.names)
                file = File(self.index, code, None, self.label, inner)
                for name, bound in list(inner.names.items()):
                    if bound == ("def",):
                        inner.names[name] = None
                new = file.run().result()
                self.problems += file.problems
            except SyntaxError:
                new = self.plain(code, scope)
            out.append("".join((fence[1] if line.strip() else "") + line for line in new.splitlines(True)))
            last = fence.end(2)
        out.append(self.plain(self.text[last:], scope))
        return "".join(out)

    def plain(self, text, scope):
        self.scope = scope
        return prose(text, self)

    def span_name(self, head, rest):
        index = self.index
        if rest == ".py":  # a file beside others that the page has named with their folder
            news = {new.split(".")[-1] for old, new in index.table.modules.items()
                    if old.split(".")[-1] == head and old in index.files}
            return f"{news.pop()}.py" if len(news) == 1 else None
        bound = self.scope.names.get(head)
        if bound is not None and bound[0] == "import":
            candidates = {index.resolve(bound[1], bound[2])} - {None}
        elif head in index.bindings["outrider"] and head[:1].isupper():  # a public name
            candidates = {index.resolve("outrider", head)} - {None}
        elif head.lstrip("_")[:1].isupper():
            candidates = {("sym", module, name) for module, name in index.unique.get(head, ())}
        else:
            candidates = set()
        if len(candidates) == 1:
            origin = candidates.pop()
            return chained(index, origin, index.new_name(origin, head), rest)
        if rest and f"{head}{rest}" not in METHODS:
            module = index.standing(f"outrider.{head}")
            if module in index.files:
                origin = ("mod", module)
                return chained(index, origin, index.new_name(origin, head), rest)
        return None


#: Code spans that look like modules and are methods.
METHODS = {"engine.run", "engine.step", "planner.plan"}


def undent(code, indent):
    return re.sub(rf"^{indent}", "", code, flags=re.M) if indent else code


def moved_paths(index, table, root):
    """Old repository path -> new, for files and folders."""
    moves = {}
    for module, path in index.files.items():
        new = longest(table.modules, module)
        if new == module:
            continue
        old = path.relative_to(root)
        target = Path("src", *new.split("."))
        target = target / "__init__.py" if path.name == "__init__.py" else target.with_suffix(".py")
        moves[str(old)] = str(target)
        if path.name == "__init__.py":
            moves[str(old.parent)] = str(target.parent)
            for other in path.parent.rglob("*"):  # data beside the modules
                if other.is_file() and other.suffix not in (".py", ".pyc") and "__pycache__" not in other.parts:
                    inner = other.relative_to(root)
                    parts = list(inner.relative_to("src").parent.parts)
                    home = longest(table.modules, ".".join(parts))
                    moves.setdefault(str(inner), str(Path("src", *home.split(".")) / other.name))
    for old, new in table.paths.items():
        if (root / old).exists():
            moves[old] = new
            if (root / old).is_dir():
                for other in (root / old).rglob("*"):
                    if other.is_file() and "__pycache__" not in other.parts:
                        inner = str(other.relative_to(root))
                        explicit = table.paths.get(inner)
                        moves[inner] = explicit or str(Path(new) / other.relative_to(root / old))
                    elif other.is_dir() and other.name != "__pycache__":
                        moves[str(other.relative_to(root))] = str(Path(new) / other.relative_to(root / old))
    return moves


def mover(moves):
    shorts = {}
    for old, new in moves.items():
        for prefix in ("src/outrider/", "src/", "tests/", ""):
            if old.startswith(prefix):
                shorts.setdefault(old[len(prefix):], new[len(prefix):] if new.startswith(prefix) else new)

    def moved(text):
        bare = text.rstrip("/")
        prefix = ""
        while bare.startswith("../") or bare.startswith("./"):
            cut = bare.index("/") + 1
            prefix, bare = prefix + bare[:cut], bare[cut:]
        tail = ""
        if "/" not in text:
            return text
        probe = bare
        while probe:
            if probe in shorts and ("/" in probe or text.endswith("/")):
                return prefix + shorts[probe] + tail + ("/" if text.endswith("/") and not tail.endswith("/") else "")
            if "/" not in probe:
                break
            probe, _, last = probe.rpartition("/")
            tail = f"/{last}{tail}"
        return text
    return moved


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--room", default="all")
    parser.add_argument("--table", type=Path, default=HERE / "table.tsv")
    parser.add_argument("--check", action="store_true", help="say what would happen, write nothing")
    parser.add_argument("--no-types", action="store_true", help="leave out attributes and parameters")
    args = parser.parse_args()
    root = args.root.resolve()
    table = Table(args.table, args.room)
    index = Index(root, table)
    index.unique = defaultdict(set)
    everywhere = defaultdict(set)
    for module, names in index.bindings.items():
        for name, bound in names.items():
            if bound == ("def",):
                everywhere[name].add((module, name))
    for (module, name) in table.all_names:  # of rooms that are done, too
        everywhere[name].add((index.standing(module), name))
    for (module, name) in index.names:
        if everywhere[name] <= {(module, name)}:
            index.unique[name].add((module, name))
    moves = moved_paths(index, table, root)
    index.moved = mover(moves)
    typed = {}
    if not args.no_types and (table.attrs or table.params):
        sys.path.insert(0, str(HERE))
        import bytypes as by_types
        typed = by_types.find(root, table, index)
    tracked = sh(root, "git", "ls-files").splitlines()
    problems, written = [], 0
    modules = {str(path.relative_to(root)): module for module, path in index.files.items()}
    for name in tracked:
        first = name.split("/")[0]
        if first not in PLACES and name not in TOP and not name.startswith(".github/"):
            continue
        if any(fnmatch.fnmatch(name, pattern) for pattern in UNTOUCHED):
            continue
        path = root / name
        if path.suffix not in TEXTS or not path.is_file():
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        new = text
        if path.suffix == ".py":
            file = File(index, text, modules.get(name), name)
            for line, col, old, word in typed.get(name, ()):
                file.swap(file.at(line, col), old, word)
            new = file.run().result()
            problems += file.problems
        elif path.suffix == ".md":
            page = Page(index, text, name)
            new = page.run()
            problems += page.problems
        else:
            loose = Page(index, text, name)
            loose.scope = Scope(None, "module")
            new = prose(text, loose, prose_names=False)
        if path.suffix == ".py":
            for old, new_path in table.paths.items():  # helpers import each other by stem
                before, behind = Path(old).stem, Path(new_path).stem
                if old.endswith(".py") and before != behind:
                    new = re.sub(rf"^(\s*(?:from|import) ){before}\b", rf"\g<1>{behind}", new, flags=re.M)
        for globs, pattern, after, without in table.texts:
            if not any(fnmatch.fnmatch(name, glob) for glob in globs):
                continue
            if without is None:
                new = pattern.sub(after, new)
            else:
                new = "".join(line if without.search(line) else pattern.sub(after, line) for line in new.splitlines(True))
        if new != text:
            written += 1
            if not args.check:
                path.write_text(new, "utf-8")
    for line in sorted(set(problems)):
        print("problem:", line)
    if args.check:
        print(f"{written} files would change, {len(moves)} paths would move; {len(set(problems))} problems")
        return
    files = {old: new for old, new in moves.items() if (root / old).is_file() and old in set(tracked)}
    for old, new in sorted(files.items()):
        if (root / new).exists():
            print(f"problem: {new} is there already; {old} stays")
            continue
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        sh(root, "git", "mv", old, new)
    for old in sorted((o for o in moves if (root / o).is_dir()), reverse=True):
        for cache in (root / old).rglob("__pycache__"):
            for item in cache.iterdir():
                item.unlink()
            cache.rmdir()
        left = [p for p in (root / old).rglob("*") if p.is_file()]
        if not left:
            for inner in sorted((p for p in (root / old).rglob("*") if p.is_dir()), reverse=True):
                inner.rmdir()
            (root / old).rmdir()
    finish(root)
    print(f"{written} files changed, {len(files)} files moved; {len(set(problems))} problems")


def finish(root):
    """Sorted imports, the project's format, and long lines of comments and docstrings wrapped."""
    ruff = str(Path(sys.executable).parent / "ruff")
    for words in (["check", "--fix", "-q", "--select", "I,RUF022", "."], ["format", "-q", "."]):
        done = subprocess.run([ruff, *words], cwd=root, capture_output=True, text=True)
        if done.returncode > 1:
            print(done.stdout, done.stderr)
    for _ in range(2):
        done = subprocess.run([ruff, "check", "--output-format", "concise", "--select", "E501,W505", "."], cwd=root, capture_output=True, text=True)
        long = defaultdict(list)
        for line in done.stdout.splitlines():
            found = re.match(r"(.+?\.py):(\d+):\d+: E501", line)
            if found:
                long[found[1]].append(int(found[2]))
        for name, numbers in long.items():
            wrap(root / name, numbers)
    subprocess.run([ruff, "format", "-q", "."], cwd=root)
    if (root / "tools/cli_reference.py").is_file():
        import os
        done = subprocess.run([sys.executable, "tools/cli_reference.py"], cwd=root, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(root / "src")})
        if done.returncode:
            print("problem: docs/cli.md:", done.stderr.strip()[-300:])
    done = subprocess.run([ruff, "check", "--output-format", "concise", "."], cwd=root, capture_output=True, text=True)
    print(done.stdout.strip())


def bracket(line, width):
    """Where a line of code may be cut inside brackets; 0: nowhere."""
    depth, best = 0, 0
    for place, letter in enumerate(line[:width]):
        depth += (letter in "([{") - (letter in ")]}")
        if depth and (letter in "([{" or line[place:place + 2] == ", "):
            best = place + (1 if letter in "([{" else 2)
    return best


def wrap(path, numbers, width=100):
    lines = path.read_text("utf-8").splitlines()
    kinds = {}
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        if token.type == tokenize.COMMENT:
            kinds[token.start[0]] = "comment" if lines[token.start[0] - 1].lstrip().startswith("#") else ("trailing", token.start[1])
        elif token.type == tokenize.STRING and re.match(r'[rR]?"""', token.string):
            if lines[token.start[0] - 1].lstrip().startswith(('"""', 'r"""')):
                for number in range(token.start[0], token.end[0] + 1):
                    kinds[number] = ("doc", token.end[0])
    for number in sorted(numbers, reverse=True):
        at = number - 1
        kind = kinds.get(number)
        if kind is None:
            piece = re.fullmatch(r'(\s*)(f?)"((?:[^"\\]|\\.)*)"([,)]*)', lines[at])
            if piece:  # a part of a long string
                cut = piece[3].rfind(" ", 0, width - len(piece[1]) - 4) + 1
                while cut > 0 and piece[2] and piece[3][:cut].count("{") != piece[3][:cut].count("}"):
                    cut = piece[3].rfind(" ", 0, cut - 1) + 1
                if cut > 0:
                    lines[at:at + 1] = [f'{piece[1]}{piece[2]}"{piece[3][:cut]}"', f'{piece[1]}{piece[2]}"{piece[3][cut:]}"{piece[4]}']
                    continue
            for later in range(at, min(at + 15, len(lines))):  # formatted by hand: no longer
                if lines[later].endswith("# fmt: skip"):
                    lines[later] = lines[later].removesuffix("# fmt: skip").rstrip()
                    break
            continue
        if kind[0] == "trailing":
            code, comment = lines[at][:kind[1]].rstrip(), lines[at][kind[1]:]
            lines[at:at + 1] = [re.match(r" *", code)[0] + comment.replace("#:", "#", 1), code]
            continue
        if lines[at].lstrip().startswith((">>> ", "... ")):
            cut = bracket(lines[at], width)
            if cut:
                indent = re.match(r" *", lines[at])[0]
                lines[at:at + 1] = [lines[at][:cut].rstrip(), f"{indent}...     {lines[at][cut:].strip()}"]
            continue
        while len(lines[at]) > width:
            indent = re.match(r" *(?:#:? )?", lines[at])[0]
            cut = lines[at].rfind(" ", 0, width + 1)
            if cut <= len(indent):
                break
            head, rest = lines[at][:cut].rstrip(), lines[at][cut + 1:]
            lines[at] = head
            following = lines[at + 1] if at + 1 < len(lines) else ""
            bare = following[len(indent):]
            prose = (following.startswith(indent) and bare and not bare[0].isspace() and "  " not in bare.strip()
                     and not bare.startswith((">>>", "- ", "* ", "|", "#", '"""', ":")) and not rest.endswith('"""')
                     and (indent.strip() or (isinstance(kind, tuple) and at + 2 <= kind[1])))
            if indent.strip() and not following.lstrip().startswith("#"):
                prose = False
            if prose:
                lines[at + 1] = f"{indent}{rest} {bare}"
            else:
                lines.insert(at + 1, indent + rest)
            at += 1
    path.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
