"""Worker processes forked by a small server: a library of its own, which knows no environments.

``client`` is the trainer's side, ``server`` the program that it starts. The server is a process
that never touched CUDA or threads that work, and OpenGL only where a fork may inherit it, so
forking it is safe whatever the trainer has done; it loads what all workers need once, and they
share that memory. It exists because the standard library's forkserver leaves a stopped worker,
itself and their memory behind after SIGKILL of the trainer, and lets any forked child of the
trainer keep them alive; docs/vector.md has the details.
``interrupts`` holds Ctrl-C back between two messages.
"""
