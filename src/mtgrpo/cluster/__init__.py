"""A run that trains on several ranks: its processes, and the door between them and the controller.

The *controller* is the process with the event loop; *ranks* train, alike. `launch.py` starts them, `rank.py` is what a
rank does, `controller.py` what stands in the controller for a trainer of its own, `wire.py` what passes between them.
"""
