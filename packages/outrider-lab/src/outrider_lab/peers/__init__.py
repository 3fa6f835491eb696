"""What people would use instead, side by side on one core: `outrider bench peers`.

engine_process   an engine in a process of its own; its Python needs the engine and nothing of ours
engines          which engines there are, how one is installed, and talking to its process
text             prompts: time for a token, first token, memory, texts
servers          servers under 1 to 16 clients: tokens a second, processor time a token
speech           recordings: time for a minute, word error rates
page             the page: tables, pictures, commands
gguf_files       a model's folder, or a GGUF file, as a GGUF file of another type
"""
