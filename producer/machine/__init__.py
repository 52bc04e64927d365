"""What runs on this machine: the processes of `producer up`, started, supervised, taken down."""
