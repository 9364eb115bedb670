"""Tasks and environments of other libraries, each by that library itself.

All plugins are installed with rlx and import their library when an experiment names them. The
extra `gyms` installs the libraries. So an experiment that names a plugin whose library is missing
is told what to install, instead of that there is no such plugin.
"""
