"""Speech to text with Whisper: recordings in, transcripts out.

audio         recordings as samples
features      samples as what the encoder reads
settings      what is asked for
vocabulary    special tokens, languages, tasks
prompt        what a window's text begins with
windows       where windows begin and end
pieces        a window's tokens as timed pieces of text
fallback      whether a text will do, or another temperature is tried
hearing       a Whisper model behind all this: states, languages
decoding      windows as requests of one run
words         when each word is said (with alignment)
reference     text to copy from, window by window
transcriber   recordings side by side
result        what comes out (with formats)
"""
