import ast,sys,collections
from pathlib import Path
root=Path(sys.argv[1] if len(sys.argv)>1 else '.')/'src/outrider'
d=collections.defaultdict(list); f=collections.defaultdict(list); n=0
for p in sorted(root.rglob('*.py')):
    t=ast.parse(p.read_text())
    for x in ast.walk(t):
        if isinstance(x,ast.ClassDef): d[x.name].append(f"{p.relative_to(root)}:{x.lineno}"); n+=1
    for x in t.body:
        if isinstance(x,ast.FunctionDef): f[x.name].append(str(p.relative_to(root)))
rep={k:v for k,v in d.items() if len(v)>1}
print(n,'classes',len(d),'names;',len(rep),'repeated')
for k,v in sorted(rep.items()): print(k,' '.join(v))
if '-f' in sys.argv:
    for k,v in sorted(f.items(),key=lambda kv:-len(kv[1])):
        if len(v)>3: print(k,len(v),' '.join(v))
