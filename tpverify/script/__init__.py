"""Stand-alone scripts: one failing case as a program that needs torch, the library under test and nothing of tpverify."""
