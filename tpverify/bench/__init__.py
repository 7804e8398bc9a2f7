"""How fast: the simulator beside other ways to run ranks, what a case costs by part, what grows with what, and how soon bugs are found."""
