"""`python -m outrider`: the command line."""

if __name__ == "__main__":  # a server's other process reads this file, and needs none of it
    from outrider.cli import main

    main()
