"""What is certified: one file or folder per zoo, each with a ``ZOO``. Declarations first; torch only inside the builders."""
