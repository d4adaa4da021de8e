"""The local machine: disk, processes, hardware, signatures. The only package that imports psutil."""
