"""Things of others, each with its task, reward, environment, tool, agent, sink, engine or whatever it offers together.

Nothing imports this folder: `parts/extension.py` finds what is in it by name, and everything else works without it. One
module or folder = one name; the modules of a folder offer their options under the folder's name, but where it
has two options of one kind each is called as its module.
"""
