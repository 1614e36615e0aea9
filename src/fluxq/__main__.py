from fluxq.cli import main

if __name__ == "__main__":
    main()
